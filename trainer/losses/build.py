"""The losses by the name that a recipe gives them."""

import math
from collections.abc import Callable

from trainer.config import Loss as LossConfig
from trainer.losses.base import Loss
from trainer.losses.binary import OneVsAll
from trainer.losses.contrastive import DecoupledSoftmax, InfoNCE, SoftmaxCrossEntropy
from trainer.losses.soft_top_k import SoftTopK
from trainer.losses.triplet import Triplet

LOSSES: dict[str, Callable[[LossConfig], Loss]] = {
    "bce": lambda c: OneVsAll(c.temperature, c.chunk),
    "softmax": lambda c: SoftmaxCrossEntropy(c.temperature, c.chunk),
    "infonce": lambda c: InfoNCE(c.temperature, c.chunk),
    "decoupled": lambda c: DecoupledSoftmax(c.temperature, c.chunk),
    "softtopk": lambda c: SoftTopK(c.temperature, c.chunk, c.k, c.alpha),
    "triplet": lambda c: Triplet(c.temperature, c.chunk, c.margin, 1 - c.radius**2 / 2 if c.radius else -math.inf),
}


def is_binary(config: LossConfig) -> bool:
    """Whether every score is for itself, so that chunks of labels may be scored and updated one by one."""
    return config.kind == "bce" and config.temperature == 1 and not config.chunk


def build_loss(config: LossConfig) -> Loss:
    """The loss that a recipe's section `loss` describes."""
    return LOSSES[config.kind](config)
