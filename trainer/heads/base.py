"""Heads compute the loss from query and candidate embeddings, return its gradient on the queries, and update rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from trainer.encoders.base import Encoder
from trainer.inputs import Inputs
from trainer.negatives.base import Sampled
from trainer.negatives.planner import Planner
from trainer.stream.batch import Batch, Candidates

# Called before rows of candidates (counted from the rank's first label) change. For labels that a device merged, the
# second argument is the ids [n], including padding.
BeforeChange = Callable[[Candidates, torch.Tensor | None], None]


@dataclass(frozen=True)
class HeadStep:
    """Input of a head's step: the global `batch`, its query embeddings x [B, D], and the negatives found with x.

    `number`: index of the step in the run, from 0. `factor` scales every rate. `before_change` is called
    before rows change.
    """

    batch: Batch
    x: torch.Tensor
    sampled: list[Sampled]
    planner: Planner
    number: int
    factor: float
    before_change: BeforeChange


class Head(ABC):
    """This rank's labels [start, stop), out of all labels [0, labels), and the vectors that x is scored against."""

    labels: int
    start: int
    stop: int
    bias = False  # True: vectors have a last column, which is multiplied by a constant 1 in x
    has_rows = True  # False: labels are encoded, so no label has a row

    @property
    @abstractmethod
    def vectors(self) -> torch.Tensor:
        """Vectors [stop - start, D] (D + 1 with a bias), for dumps, indexes and searches."""

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return a float32 copy of the vectors `rows` [C], counted from `start`, without a gradient."""
        vectors = self.vectors
        return vectors.index_select(0, torch.from_numpy(rows).to(vectors.device)).float().cpu().numpy()

    @abstractmethod
    def learn(self, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of the loss, a scalar, and its gradient on x [B, D]; update the head's rows.

        Never waits for the device.
        """

    def backward(self) -> None:  # noqa: B027
        """Add the gradients of the last call of `learn` to the encoders."""

    def encoders(self) -> dict[str, Encoder]:
        """Return all encoders except the query encoder, keyed by the name of their part of a checkpoint."""
        return {}

    def drop_cached_vectors(self) -> None:  # noqa: B027
        """Drop results that were cached before the encoders changed."""

    def extend(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [B, D], with a last column of ones appended if the vectors have a bias."""
        return torch.cat([x, x.new_ones(len(x), 1)], 1) if self.bias else x

    def label_inputs(self) -> Iterator[Inputs]:
        """If labels are encoded, yield the texts of this rank's labels, in the same number of pieces on every rank."""
        return iter(())

    def rows(self, optimizer: bool = True) -> dict[str, torch.Tensor]:
        """Return all rows [n, ...] of this rank's labels by name; with `optimizer`, also the optimizer's state."""
        return {}
