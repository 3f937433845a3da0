"""A second loss of a method, on embeddings of queries alone, beside the loss on the scores of labels.

`Recipe.second_loss` opens it. `papers/rae/rae.py` is an example, and docs/extending.md describes the interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from trainer.stream import Batch, Source


class SecondLoss(ABC):
    """A loss without parameters of its own, whose gradient at x is added to the gradient of the first loss."""

    def scratch_bytes(self, rows: int) -> int:
        """Return the bytes of scratch files that a rank needs beside a run on `rows` training rows."""
        return 0

    def begin(self, sources: list[Source]) -> None:  # noqa: B027
        """Begin an epoch, also one that is resumed; `sources` have the epoch's table. Raises TableError."""

    @abstractmethod
    def learn(self, batch: Batch, x: torch.Tensor, queries: int) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        """Return the loss of a rank's part of a batch, and the gradient at its embeddings x [b, D], without a sum.

        `queries`: number of queries of all ranks. The trainer adds the losses of the ranks, so a mean over the batch
        divides by `queries`. Both are called on every rank, in each step; b may be 0.
        """
