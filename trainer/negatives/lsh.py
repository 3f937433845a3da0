"""Locality-sensitive negative sampling (LNS, Algorithm 1): labels whose vectors hash as the query does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from schemas.ragged import Ragged
from schemas.randomness import HashTablesStream, Purpose, generator
from trainer.negatives.base import NegativeSource, Sampled, State, ids_from, within
from trainer.negatives.hash_functions import open_hashes
from trainer.negatives.hash_tables import HashTables
from trainer.negatives.lsh_section import LshSection

if TYPE_CHECKING:
    import torch

    from trainer.negatives.base import Vectors
    from trainer.stream.batch import Batch


_HASHED = 1 << 16  # rows of the classifier at a time


def is_due(step: int, every: int, growth: float) -> bool:
    """Tell whether touched rows are hashed again after `step` steps: number k comes growth**k * `every` after the last.

    LNS, section 3.3: every 50 iterations at first, exponentially less often then.
    """
    return _rehashed(step, every, growth) > _rehashed(step - 1, every, growth)


def _rehashed(step: int, every: int, growth: float) -> int:
    """Count the times that rows were hashed again in `step` steps: the largest k with
    every (growth**k - 1) / (growth - 1) <= step.
    """
    if step <= 0:
        return 0
    if growth == 1:
        return step // every
    # A step more than the sum asks for is better than one that rounding takes away.
    return int(math.log1p(step * (growth - 1) / every) / math.log(growth) + 1e-9)


class HashedNegatives(NegativeSource):
    """Labels in the buckets of the query, in hash tables over the vectors of a rank's labels.

    Everything is a function of (options, seed), the vectors, and the (epoch, step) of each call.
    """

    name = "lsh"
    stateful = True

    def __init__(self, options: LshSection, vectors: Vectors, seed: int = 0, first_epoch: int = 0) -> None:
        self.options, self.seed, self.first_epoch = options, seed, first_epoch
        self._vectors, self._touched = vectors, list[np.ndarray]()
        self.labels, dimension = vectors.vectors.shape
        self.hashes = open_hashes(options.family, dimension, options.bits, options.tables, seed, options.width)
        self.tables = HashTables(self.labels, options.tables, self.hashes.buckets, options.capacity, options.policy)
        self._started = False

    def find(self, batch: Batch, x: torch.Tensor | None = None) -> Sampled:
        assert x is not None
        if not self._started:
            self.start()
        batch = within(batch, self._vectors.start, self._vectors.stop)
        positives = Ragged(batch.positives, batch.positive_offsets)
        labels = self.sample(x.float().cpu().numpy(), positives, epoch=batch.epoch, step=batch.step)
        return Sampled(ids_from(labels.padded(), self._vectors.start))

    def start(self) -> None:
        """Hash every row: linear in their number, once a run, where `load` brings no state of an earlier step."""
        self._started = True
        for start in range(0, self.labels, _HASHED):
            ids = np.arange(start, min(start + _HASHED, self.labels))
            self.tables.insert(start, self.hashes.codes(self._vectors.read(ids)), self._key(0, 0))

    def touch(self, rows: np.ndarray) -> None:
        if self._started:
            self._touched.append(rows)

    def after_step(self, global_step: int, epoch: int, step: int) -> None:
        """Hash touched rows again if it is due after `global_step` steps."""
        if is_due(global_step, self.options.every, self.options.growth):
            self.rehash(epoch, step)

    def rehash(self, epoch: int, step: int) -> int:
        """Hash the touched rows again; return their number."""
        touched = self.touched
        self._touched.clear()
        for start in range(0, len(touched), _HASHED):
            ids = touched[start : start + _HASHED]
            self.tables.move(ids, self.hashes.codes(self._vectors.read(ids)), self._key(epoch, step))
        return len(touched)

    @property
    def touched(self) -> np.ndarray:
        """Rows that are to be hashed again, each once, ascending, int64."""
        return np.unique(np.concatenate(self._touched)) if self._touched else np.empty(0, np.int64)

    def sample(self, x: np.ndarray, positives: Ragged, *, epoch: int, step: int) -> Ragged:
        """Return negatives of B queries, int32, each once and no positive.

        x [B, D]. By embedding (Theorem 2) x is hashed; by label (Theorem 1) one positive a query, drawn anew each step,
        stands for it with the code that it lies under, and a query without a positive gets nothing.
        """
        draw = generator(self.seed, Purpose.HASH_TABLES, epoch, step, HashTablesStream.QUERIES)
        order = draw.permutation(self.options.tables)
        if self.options.query == "embedding":
            return self.tables.find(self.hashes.codes(x), order, positives, self.options.limit)
        values, offsets = positives
        counts = positives.counts
        queries = np.flatnonzero(counts)
        drawn = values[offsets[queries] + draw.integers(0, counts[queries])]
        # Rows without a positive take nothing from `values`, so its offsets without them are those of the rest.
        without = Ragged(values, np.append(offsets[queries], offsets[-1]))
        labels = self.tables.find(self.tables.codes[drawn], order, without, self.options.limit)
        sizes = np.zeros(len(counts), np.int64)
        sizes[queries] = labels.counts
        return Ragged.from_counts(labels.values, sizes)

    def state(self) -> State:
        return {**self.tables.state(), "touched": self.touched} if self._started else {}

    def load(self, state: State) -> None:
        self.tables.load(state)
        self._touched, self._started = [state["touched"].copy()], True

    def _key(self, epoch: int, step: int) -> int:
        return int(generator(self.seed, Purpose.HASH_TABLES, epoch, step, HashTablesStream.KEPT).integers(0, 2**63))
