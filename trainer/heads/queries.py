"""Embeddings of a batch's queries in training, and the way of their gradient back into the encoder."""

from collections.abc import Callable
from typing import Protocol

import torch

from trainer.encoders import Encoder
from trainer.encoders.frozen import FrozenEmbeddings
from trainer.group import Group
from trainer.heads.gradient_cache import CachedEmbeddings, EmbeddingKey
from trainer.stream.batch import Batch


class QueryEmbeddings(Protocol):
    """Embeddings of one batch after the other, each followed by its gradient."""

    trains: bool  # False: the encoder stays as it is, and no gradient is wanted

    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        """Return x [b, D] of a rank's part of a batch, without a graph; it begins at row `first` of the global one."""

    def backward(self, gradient: torch.Tensor) -> None:
        """Add to the encoder's gradients from `gradient` [b, D] on the last x."""


class WholeBatch:
    """Queries at once, with their graph in memory; `lap` hears when they are prepared."""

    trains = True

    def __init__(self, encoder: Encoder, group: Group, lap: Callable[[str], None]) -> None:
        self._encoder, self._group, self._lap = encoder, group, lap

    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        key = batch.epoch, batch.step
        inputs = self._encoder.prepare(batch.inputs, key, self._group.before)
        self._lap("prepare")
        self._x = self._encoder.encode(inputs, key)
        return self._x.detach()

    def backward(self, gradient: torch.Tensor) -> None:
        self._x.backward(gradient)


class SubBatches:
    """Queries in `parts` sub-batches, or in such of `size` rows (0: one), the graph of one in memory at a time."""

    trains = True

    def __init__(self, encoder: Encoder, size: int = 0, parts: int = 0) -> None:
        self._encoder, self._size, self._parts = encoder, size, parts

    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        size = -(-len(batch) // self._parts) if self._parts else self._size
        key = EmbeddingKey(batch.epoch, batch.step, first=first)
        self._cached = CachedEmbeddings(self._encoder, batch.inputs.slice, len(batch), size, key)
        return self._cached.embed().detach()

    def backward(self, gradient: torch.Tensor) -> None:
        self._cached.backward(gradient)


class FrozenQueries:
    """Queries by an encoder that does not learn, each encoded once."""

    trains = False

    def __init__(self, embeddings: FrozenEmbeddings) -> None:
        self._embeddings = embeddings

    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        return self._embeddings.of(batch)

    def backward(self, gradient: torch.Tensor) -> None:
        raise AssertionError("a frozen encoder takes no gradient")
