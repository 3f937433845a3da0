"""A batch as the stream deals it: columns, not rows."""

from dataclasses import dataclass

import numpy as np

from trainer.inputs import Inputs, cut


@dataclass(frozen=True)
class Batch:
    """B queries of one global step (a rank's part of it).

    `rows` [B] int64 global row ids; `inputs` what the encoder reads of them; `positives` [sum P] with
    `positive_offsets` [B + 1]; `hard` [B, K] joined from the table, -1 pads, or None before the first table.
    """

    epoch: int
    step: int
    rows: np.ndarray
    inputs: Inputs
    positives: np.ndarray
    positive_offsets: np.ndarray
    hard: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Columns:
    """Rows of a window in the order in which batches take them."""

    rows: np.ndarray
    inputs: Inputs
    positives: np.ndarray
    positive_offsets: np.ndarray
    hard: np.ndarray | None

    def slice(self, epoch: int, step: int, start: int, stop: int) -> Batch:
        """Rows [start, stop) as the batch of `step`; values are views, not copies."""
        positives = cut(self.positives, self.positive_offsets, start, stop)
        hard = None if self.hard is None else self.hard[start:stop]
        return Batch(epoch, step, self.rows[start:stop], self.inputs.slice(start, stop), *positives, hard)
