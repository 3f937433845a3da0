"""A batch as the stream deals it: columns, not rows."""

from dataclasses import dataclass

import numpy as np

from trainer.inputs import Inputs


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
