"""Encoders: text, as token ids, or sparse features to x in R^D."""

from trainer.encoders.base import Encoder

__all__ = ["Encoder"]
