"""Embed the queries of a training batch, and back-propagate the gradient on the embeddings into the encoder.

With gradient caching (Gao et al., 2021; DEXML, section B.5), a loss can use any number of embeddings, while only the
encoder activations of one sub-batch are in memory. First encode without a graph and compute the gradient on the
embeddings. Then encode each sub-batch again with a graph, and back-propagate its part of the gradient. The second pass
draws the same dropout as the first pass, because an encoder's random numbers are a function of the dropout key.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from schemas.mapped import ScratchFile
from trainer.device import CPU
from trainer.encoders.base import Encoder
from trainer.group import Group
from trainer.inputs import Inputs
from trainer.stream import Batch, Source
from trainer.stream.transfer import AsyncCopy, send

QUERY_DROPOUT, LABEL_DROPOUT = 0, 1  # two kinds of dropout key
_MAX_IN_FLIGHT = 2  # maximum number of batches that a GPU is sending


def dropout_key(batch: Batch, kind: int, first: int, start: int) -> tuple[int, int, int]:
    """Return the dropout key of a sub-batch that starts at row `first + start` over all ranks.

    `kind`: QUERY_DROPOUT or LABEL_DROPOUT. A row's dropout does not depend on the number of ranks if sub-batches begin
    at the same rows.
    """
    return batch.epoch, batch.step, 2 * (first + start) + kind


class CachedEmbeddings:
    """Embeddings x [n, D] of training rows, computed `size` at a time without a graph; `backward` computes x again.

    `inputs(start, stop)` returns rows [start, stop) of the n rows, and `key(start)` returns their dropout key. If there
    is a single sub-batch, its graph is kept, so nothing is computed twice.
    """

    def __init__(
        self,
        encoder: Encoder,
        inputs: Callable[[int, int], Inputs],
        count: int,
        size: int,
        key: Callable[[int], tuple[int, ...]],
    ) -> None:
        self._encoder, self._inputs, self._count = encoder, inputs, count
        self._size = size or max(1, count)
        self._key = key
        self._graph: torch.Tensor | None = None

    def embed(self) -> torch.Tensor:
        """Return x [n, D], a leaf that requires a gradient."""
        if 0 < self._count <= self._size:
            self._graph = self._encode(0, self._count)
            return self._graph.detach().requires_grad_()
        x = torch.empty(self._count, self._encoder.dimension, device=self._encoder.device)
        with torch.no_grad():
            for start, stop in self._parts():
                x[start:stop] = self._encode(start, stop)
        return x.requires_grad_()

    def backward(self, grad: torch.Tensor) -> None:
        """Add to the encoder's gradients; `grad` [n, D] is the loss's gradient on the result of `embed`."""
        if self._graph is not None:
            self._graph.backward(grad)
            self._graph = None
            return
        for start, stop in self._parts():
            self._encode(start, stop).backward(grad[start:stop])

    def _parts(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self._count, self._size):
            yield start, min(start + self._size, self._count)

    def _encode(self, start: int, stop: int) -> torch.Tensor:
        key = self._key(start)
        return self._encoder.encode(self._encoder.prepare(self._inputs(start, stop), key), key)


class QueryEmbeddings(ABC):
    """Embeds batches one after another; call `backward` for each batch before embedding the next batch."""

    trains = True  # False: the encoder does not change, and needs no gradient

    def begin(self, sources: Sequence[Source]) -> None:  # noqa: B027
        """Begin an epoch over `sources`."""

    def preparing(self) -> Callable[[Batch], Any] | None:
        """Return a function that prepares a whole batch ahead, in any thread; None if no batch is prepared ahead."""
        return None

    @abstractmethod
    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        """Return x [b, D] of a rank's part of a batch, without a graph; the part starts at row `first` of the batch."""

    @abstractmethod
    def backward(self, gradient: torch.Tensor) -> None:
        """Add to the encoder's gradients; `gradient` [b, D] is the loss's gradient on the last x."""


class WholeBatch(QueryEmbeddings):
    """Encodes all queries at once, with the graph in memory; `lap` is called when the queries are prepared."""

    def __init__(self, encoder: Encoder, group: Group, lap: Callable[[str], None]) -> None:
        self._encoder, self._group, self._lap = encoder, group, lap
        self._x: torch.Tensor | None = None

    def preparing(self) -> Callable[[Batch], Any] | None:
        # With several ranks, each rank sends its number of rows within a step.
        return self._prepare if self._encoder.device != CPU and self._group.ranks == 1 else None

    def _prepare(self, batch: Batch) -> Any:
        return self._encoder.prepare(batch.inputs, (batch.epoch, batch.step), self._group.before)

    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        inputs = self._prepare(batch) if batch.prepared is None else batch.prepared
        self._lap("prepare")
        self._x = self._encoder.encode(inputs, (batch.epoch, batch.step))
        return self._x.detach()

    def backward(self, gradient: torch.Tensor) -> None:
        # The graph ends here: nodes shared with the next graph would run on the stream of this step.
        x, self._x = self._x, None
        assert x is not None, "`backward` needs an earlier call of `embed`"
        with self._encoder.exchanging(self._group):
            x.backward(gradient)


class SubBatches(QueryEmbeddings):
    """Encodes queries in `parts` sub-batches, with one graph at a time."""

    def __init__(self, encoder: Encoder, parts: int) -> None:
        self._encoder, self._parts = encoder, parts

    def embed(self, batch: Batch, first: int) -> torch.Tensor:
        size = -(-len(batch) // self._parts)
        key = partial(dropout_key, batch, QUERY_DROPOUT, first)
        self._cached = CachedEmbeddings(self._encoder, batch.inputs.slice, len(batch), size, key)
        return self._cached.embed().detach()

    def backward(self, gradient: torch.Tensor) -> None:
        self._cached.backward(gradient)


class FrozenQueries(QueryEmbeddings):
    """Encodes queries with a frozen encoder, each query once (NGAME, appendix C, module M2), without dropout.

    A float16 scratch file [N, D] contains x of each training row, indexed by row id. Every x is rounded to float16, so
    a resumed run that encodes the rows again gets the same x. Row ids refer to the tables of an epoch, so all rows are
    encoded again if the tables change.
    """

    trains = False

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._tables: list[str] = []
        self._arriving: deque[tuple[np.ndarray, AsyncCopy]] = deque()

    def begin(self, sources: Sequence[Source]) -> None:
        """Begin an epoch over `sources`: drop the rows of other sources."""
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
        self._fetch(_MAX_IN_FLIGHT)
        new = np.flatnonzero(~self._encoded[batch.rows])
        encoded = None
        if len(new):
            encoded = self._encoder.encode(self._encoder.prepare(batch.inputs.take(new))).half()
            self._arriving.append((batch.rows[new], AsyncCopy(encoded)))
            self._fetch(0 if on_host else _MAX_IN_FLIGHT)
        x: torch.Tensor = send(self._x[batch.rows].astype(np.float32), self._encoder.device)
        if encoded is not None and not on_host:
            x[send(new, x.device)] = encoded.float()  # not in the file yet
        return x

    def _fetch(self, left: int) -> None:
        """Write the batches that have arrived from the device to the file, except the last `left` batches."""
        while len(self._arriving) > left:
            rows, x = self._arriving.popleft()
            self._x[rows] = x.take()
            self._encoded[rows] = True

    def backward(self, gradient: torch.Tensor) -> None:
        raise AssertionError("a frozen encoder has no gradient")
