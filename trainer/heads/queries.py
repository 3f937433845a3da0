"""Embeddings of a batch's queries in training, and the way of their gradient back into the encoder."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from schemas.mapped import ScratchFile
from trainer.device import CPU
from trainer.encoders import Encoder
from trainer.group import Group
from trainer.heads.gradient_cache import CachedEmbeddings, EmbeddingKey
from trainer.stream import Batch, Source
from trainer.stream.transfer import LateCopy, send

_BEHIND = 2  # batches that may be on their way from a GPU


class QueryEmbeddings(ABC):
    """Embeddings of one batch after the other, each followed by its gradient."""

    trains = True  # False: the encoder stays as it is, and no gradient is wanted

    def begin(self, sources: Sequence[Source]) -> None:  # noqa: B027
        """Begin an epoch over `sources`."""

    @abstractmethod
    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        """Return x [b, D] of a rank's part of a batch, without a graph; it begins at row `first` of the global one."""

    @abstractmethod
    def backward(self, gradient: torch.Tensor) -> None:
        """Add to the encoder's gradients from `gradient` [b, D] on the last x."""


class WholeBatch(QueryEmbeddings):
    """Queries at once, with their graph in memory, and the encoder's only ones; `lap` hears when they are prepared."""

    def __init__(self, encoder: Encoder, group: Group, lap: Callable[[str], None]) -> None:
        self._encoder, self._group, self._lap = encoder, group, lap

    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        key = batch.epoch, batch.step
        inputs = self._encoder.prepare(batch.inputs, key, self._group.before)
        self._lap("prepare")
        self._x = self._encoder.encode(inputs, key)
        return self._x.detach()

    def backward(self, gradient: torch.Tensor) -> None:
        with self._encoder.exchanging(self._group):
            self._x.backward(gradient)


class SubBatches(QueryEmbeddings):
    """Queries in `parts` sub-batches, or in such of `size` rows (0: one), the graph of one in memory at a time."""

    def __init__(self, encoder: Encoder, size: int = 0, parts: int = 0) -> None:
        self._encoder, self._size, self._parts = encoder, size, parts

    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        size = -(-len(batch) // self._parts) if self._parts else self._size
        key = EmbeddingKey(batch.epoch, batch.step, first=first)
        self._cached = CachedEmbeddings(self._encoder, batch.inputs.slice, len(batch), size, key)
        return self._cached.embed().detach()

    def backward(self, gradient: torch.Tensor) -> None:
        self._cached.backward(gradient)


class FrozenQueries(QueryEmbeddings):
    """Queries by an encoder that does not change, each encoded once (NGAME, appendix C, module M2), without dropout.

    A scratch file of [N, D] float16 holds x of the training rows by their ids, and every x is rounded to it: a run that
    is resumed encodes again and gets the same. Row ids belong to tables: with other tables all are encoded again.
    """

    trains = False

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._tables: list[str] = []
        self._arriving: deque[tuple[np.ndarray, LateCopy]] = deque()

    def begin(self, sources: Sequence[Source]) -> None:
        """Begin an epoch over `sources`: forget the rows of others."""
        self._fetch(0)
        tables = [source.table.manifest.digest for source in sources]
        if tables == self._tables:
            return
        self._tables = tables
        rows = sum(source.rows for source in sources)
        shape = (max(1, rows), self._encoder.dimension)
        scratch = ScratchFile("the embeddings of a frozen encoder").reserve(2 * shape[0] * shape[1])
        self._x = np.ndarray(shape, np.float16, scratch)
        self._encoded = np.zeros(rows, bool)

    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        on_host = self._encoder.device == CPU
        self._fetch(_BEHIND)
        new = np.flatnonzero(~self._encoded[batch.rows])
        encoded = None
        if len(new):
            encoded = self._encoder.encode(self._encoder.prepare(batch.inputs.take(new))).half()
            self._arriving.append((batch.rows[new], LateCopy(encoded)))
            self._fetch(0 if on_host else _BEHIND)
        x: torch.Tensor = send(self._x[batch.rows].astype(np.float32), self._encoder.device)
        if encoded is not None and not on_host:
            x[send(new, x.device)] = encoded.float()  # not in the file yet
        return x

    def _fetch(self, left: int) -> None:
        """Write what has come from the device, all but the last `left` batches, to the file."""
        while len(self._arriving) > left:
            rows, x = self._arriving.popleft()
            self._x[rows] = x.take()
            self._encoded[rows] = True

    def backward(self, gradient: torch.Tensor) -> None:
        raise AssertionError("a frozen encoder takes no gradient")
