"""Losses over candidate scores. Each returns the sum over queries; callers divide by the global batch size."""

from trainer.losses.base import Loss
from trainer.losses.binary import OneVsAll, binary_cross_entropy
from trainer.losses.build import build_loss, is_binary
from trainer.losses.contrastive import DecoupledSoftmax, InfoNCE, SoftmaxCrossEntropy
from trainer.losses.soft_top_k import SoftTopK
from trainer.losses.triplet import Triplet

__all__ = [
    "DecoupledSoftmax",
    "InfoNCE",
    "Loss",
    "OneVsAll",
    "SoftTopK",
    "SoftmaxCrossEntropy",
    "Triplet",
    "binary_cross_entropy",
    "build_loss",
    "is_binary",
]
