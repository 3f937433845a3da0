"""The loss that a recipe asks for."""

from trainer.config.loss import LossSection
from trainer.losses.base import Loss


def is_binary(config: LossSection) -> bool:
    """Tell whether every score is for itself, so that chunks of labels may be scored and updated one by one."""
    return config.kind == "bce" and config.temperature == 1 and not config.chunk


def build_loss(config: LossSection) -> Loss:
    """Build the loss that `config` describes."""
    loss: Loss = config.implementation.of(config)
    return loss
