"""The mean of token vectors, as in fastText, in one dense table, for vocabularies that fit into memory."""

from typing import Literal

import torch

from schemas.randomness import InitialWeights, Purpose
from trainer.device import torch_generator
from trainer.encoders.base import Before, Encoder
from trainer.group import ALONE
from trainer.inputs import Inputs
from trainer.methods.kinds import EncoderSection


class MeanSection(EncoderSection):
    kind: Literal["mean"] = "mean"
    inputs: Literal["tokens"] = "tokens"


class MeanEncoder(Encoder):
    section = MeanSection

    def __init__(self, config: MeanSection, vocabulary: int, seed: int, features: int = 0) -> None:
        bag = torch.nn.EmbeddingBag(vocabulary, config.dimension, mode="mean", include_last_offset=True)
        draw = torch_generator(seed, Purpose.INITIAL_WEIGHTS, InitialWeights.EMBEDDING)
        torch.nn.init.normal_(bag.weight, std=config.dimension**-0.5, generator=draw)
        super().__init__(config, bag, seed, config.lr)

    def prepare(self, inputs: Inputs, dropout_key: tuple[int, ...] | None = None, before: Before = ALONE.before):
        tokens, offsets = (torch.from_numpy(values.astype("int64")) for values in inputs.tokens)
        rows = len(offsets) - 1
        return tokens, offsets, self._draw_kept(rows, dropout_key, 0 if dropout_key is None else before(rows))

    def encode(self, inputs, dropout_key: tuple[int, ...] | None = None) -> torch.Tensor:
        tokens, offsets, kept = inputs
        with torch.set_grad_enabled(dropout_key is not None and torch.is_grad_enabled()):
            return self._finish(self._modules(tokens, offsets), kept)
