"""A batch as the stream deals it: columns, not rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trainer.inputs import Inputs, cut
from trainer.stream.gather import take_lists, take_matrix


@dataclass(frozen=True)
class Candidates:
    """Labels to score, each once, and how queries use them.

    `ids` [C] int64: the rows of the classifier that the step touches. The first R of them are the shared pool: every
    query is scored against it with `pool_weight` [R] float32, except for what is its own positive or hard negative,
    (`struck_query`, `struck_pool`) [m]. Pairs score one query against one label: `pair_query` [n] ascending,
    `pair_label` [n] (index into ids), `pair_positive` [n] bool, `pair_weight` [n] float32.
    """

    ids: np.ndarray
    pair_query: np.ndarray
    pair_label: np.ndarray
    pair_positive: np.ndarray
    pair_weight: np.ndarray
    pool_weight: np.ndarray
    struck_query: np.ndarray
    struck_pool: np.ndarray


@dataclass(frozen=True)
class Batch:
    """B queries of one global step (a rank's part of it).

    `rows` [B] int64 global row ids; `inputs` what the encoder reads of them; `positives` [sum P] with
    `positive_offsets` [B + 1]; `hard` [B, K] joined from the table, -1 pads, or None before the first table;
    `candidates` where the stream plans them.
    """

    epoch: int
    step: int
    rows: np.ndarray
    inputs: Inputs
    positives: np.ndarray
    positive_offsets: np.ndarray
    hard: np.ndarray | None = None
    candidates: Candidates | None = None

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
    skipped: int = 0  # rows of the window that did not decode

    @classmethod
    def take(cls, pieces: Sequence[pa.Table], rows: np.ndarray, ids: np.ndarray, skipped: int = 0) -> "Columns":
        """Rows `rows` [n] of `pieces` laid end to end; `ids` [n] are theirs."""
        order = pa.array(rows)
        positives, positive_offsets = take_lists(pieces, "label_ids", order)
        hard = take_matrix(pieces, "hard", order) if "hard" in pieces[0].column_names else None
        inputs = Inputs.read(pieces[0].column_names, lambda name: take_lists(pieces, name, order))
        return cls(ids, inputs, positives, positive_offsets, hard, skipped)

    def slice(self, epoch: int, step: int, start: int, stop: int) -> Batch:
        """Rows [start, stop) as the batch of `step`; values are views, not copies."""
        positives = cut(self.positives, self.positive_offsets, start, stop)
        hard = None if self.hard is None else self.hard[start:stop]
        return Batch(epoch, step, self.rows[start:stop], self.inputs.slice(start, stop), *positives, hard)
