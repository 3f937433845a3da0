"""Losses over candidate scores. Each returns the sum over queries; callers divide by the global batch size."""

from trainer.losses.base import Loss
from trainer.losses.binary import binary_cross_entropy

__all__ = ["Loss", "binary_cross_entropy"]
