"""Gradient caching: any number of embeddings in a loss, with the encoder's activations of one sub-batch at a time.

Gao et al., 2021, as DEXML's section B.5 uses it: encode without a graph, take the loss's gradient on the embeddings,
then encode each sub-batch again with a graph and send its share of the gradient back. The second pass draws the same
dropout as the first, because an encoder's random numbers are a function of the key that it is given.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from trainer.encoders.base import Encoder
from trainer.inputs import Inputs

QUERIES, LABELS = 0, 1  # their dropout differs


class EmbeddingKey(NamedTuple):
    """Key of the dropout of rows: queries or labels, numbered from `first` on over all ranks.

    So a row's dropout does not depend on the number of ranks, as long as sub-batches begin alike.
    """

    epoch: int
    step: int
    kind: int = QUERIES
    first: int = 0

    def of(self, start: int) -> tuple[int, int, int]:
        """Return the key of the sub-batch that begins at row `start`."""
        return self.epoch, self.step, 2 * (self.first + start) + self.kind


class CachedEmbeddings:
    """Embeddings x [n, D] of rows in training, `size` at a time without a graph; `backward` computes them again.

    `inputs(start, stop)` gives rows [start, stop) of [0, n). One sub-batch alone keeps its graph: nothing is computed
    twice.
    """

    def __init__(
        self,
        encoder: Encoder,
        inputs: Callable[[int, int], Inputs],
        count: int,
        size: int,
        key: EmbeddingKey,
    ) -> None:
        self._encoder, self._inputs, self._count = encoder, inputs, count
        self._size = size or max(1, count)
        self._key = key
        self._graph: torch.Tensor | None = None

    def embed(self) -> torch.Tensor:
        """Return x [n, D], a leaf that takes a gradient."""
        if 0 < self._count <= self._size:
            self._graph = self._encode(0, self._count)
            return self._graph.detach().requires_grad_()
        x = torch.empty(self._count, self._encoder.dimension, device=self._encoder.device)
        with torch.no_grad():
            for start, stop in self._parts():
                x[start:stop] = self._encode(start, stop)
        return x.requires_grad_()

    def backward(self, grad: torch.Tensor) -> None:
        """Add to the encoder's gradients; `grad` [n, D] is the loss's gradient on what `embed` gave."""
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
        key = self._key.of(start)
        return self._encoder.encode(self._encoder.prepare(self._inputs(start, stop), key), key)
