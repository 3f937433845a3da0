"""Encoders: text, as token ids, or sparse features to x in R^D."""

from trainer.config import Encoder as EncoderConfig
from trainer.encoders.base import Encoder


def build_encoder(config: EncoderConfig, vocabulary: int, seed: int, features: int = 0) -> Encoder:
    """The encoder that `config` describes, freshly initialised; `features`: the data's number of sparse features.

    Raises InputError.
    """
    if config.kind == "bag":
        from trainer.encoders.bag_encoder import BagEncoder

        return BagEncoder(config, vocabulary, seed, features)
    from trainer.encoders.transformer import TransformerEncoder

    return TransformerEncoder(config, seed)


__all__ = ["Encoder", "build_encoder"]
