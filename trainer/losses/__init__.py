"""Losses over candidate scores. Each returns the sum over queries; callers divide by the global batch size."""

from trainer.losses.base import Loss
from trainer.losses.binary import binary_cross_entropy
from trainer.methods.kinds import LossSection


def build_loss(config: LossSection) -> Loss:
    """Build the loss that `config` describes."""
    loss: Loss = config.implementation(config)
    return loss


__all__ = ["Loss", "binary_cross_entropy", "build_loss"]
