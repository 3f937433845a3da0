"""Encoders: text, as token ids, or sparse features to x in R^D."""

from trainer.encoders.base import Encoder
from trainer.methods.kinds import EncoderSection


def build_encoder(config: EncoderSection, vocabulary: int, seed: int, features: int = 0) -> Encoder:
    """Build the encoder that `config` describes, freshly initialised. Raises InputError.

    `features`: the data's number of sparse features.
    """
    encoder: Encoder = config.implementation(config, vocabulary, seed, features)
    return encoder


__all__ = ["Encoder", "build_encoder"]
