"""Locality-sensitive negative sampling (LNS, Algorithm 1): labels whose vectors hash as the query does."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from schemas.ragged import Ragged
from schemas.randomness import HashTables, Purpose, generator
from trainer.negatives.hash_functions import Family, open_hashes
from trainer.negatives.hash_tables import Buckets, Policy

# Rows `ids` [n] of the classifier as float32 [n, D].
Rows = Callable[[np.ndarray], np.ndarray]
_HASHED = 1 << 16  # rows of the classifier at a time


@dataclass(frozen=True)
class Options:
    """Which functions, how many tables, what a bucket keeps, and when touched rows are hashed again."""

    family: Family = "dwta"
    bits: int = 6  # K
    tables: int = 50  # L
    width: int = 2  # m of DWTA
    capacity: int = 128
    policy: Policy = "reservoir"
    query: Literal["embedding", "label"] = "embedding"
    most: int = 0  # labels a query; 0: all that are found
    every: int = 50  # steps to the first re-hash
    growth: float = 1.1  # of the steps from one re-hash to the next


def is_due(step: int, every: int, growth: float) -> bool:
    """Whether touched rows are hashed again after `step` steps: number k comes growth**k times `every` after the last.

    LNS, section 3.3: every 50 iterations at first, exponentially less often then.
    """
    return _rehashed(step, every, growth) > _rehashed(step - 1, every, growth)


def _rehashed(step: int, every: int, growth: float) -> int:
    """Times that rows were hashed again in `step` steps: the largest k with every (growth**k - 1) / (growth - 1)."""
    if step <= 0:
        return 0
    if growth == 1:
        return step // every
    # A step more than the sum asks for is better than one that rounding takes away.
    return int(math.log1p(step * (growth - 1) / every) / math.log(growth) + 1e-9)


@dataclass(eq=False)
class LshSampler:
    """Hash tables over the vectors of labels [0, N), asked for negatives and kept up with the training.

    Everything is a function of (options, seed), the vectors given, and the (epoch, step) of each call.
    """

    options: Options
    labels: int  # N
    dimension: int
    seed: int = 0
    _touched: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = self.options
        self.hashes = open_hashes(
            options.family, self.dimension, options.bits, options.tables, self.seed, options.width
        )
        self._empty()

    def _empty(self) -> None:
        options, hashes = self.options, self.hashes
        self.buckets = Buckets(self.labels, hashes.tables, hashes.buckets, options.capacity, options.policy)

    def build(self, rows: Rows, *, epoch: int = 0, step: int = 0) -> None:
        """Hash every row anew: linear in N, once a run. No row is touched afterwards."""
        self._empty()
        self._touched.clear()
        for start in range(0, self.labels, _HASHED):
            ids = np.arange(start, min(start + _HASHED, self.labels))
            self.buckets.insert(start, self.hashes.codes(rows(ids)), self._key(epoch, step))

    def touch(self, ids: np.ndarray) -> None:
        """Rows `ids` [n] were updated: they are hashed again when it is due."""
        self._touched.append(ids)

    def after_step(self, rows: Rows, global_step: int, *, epoch: int, step: int) -> int:
        """Hash what was touched again if it is due after `global_step` steps; how many rows that were."""
        if not is_due(global_step, self.options.every, self.options.growth):
            return 0
        return self.rehash(rows, epoch=epoch, step=step)

    def rehash(self, rows: Rows, *, epoch: int, step: int) -> int:
        """Hash the touched rows again now; how many they were."""
        touched = self.touched
        self._touched.clear()
        for start in range(0, len(touched), _HASHED):
            ids = touched[start : start + _HASHED]
            self.buckets.move(ids, self.hashes.codes(rows(ids)), self._key(epoch, step))
        return len(touched)

    @property
    def touched(self) -> np.ndarray:
        """Rows that wait to be hashed again, each once, ascending, int64."""
        return np.unique(np.concatenate(self._touched)) if self._touched else np.empty(0, np.int64)

    def sample(self, x: np.ndarray, positives: Ragged, *, epoch: int, step: int) -> Ragged:
        """Return negatives of B queries, int32, each once and no positive.

        x [B, D]. By embedding (Theorem 2) x is hashed; by label (Theorem 1) one
        positive a query, drawn anew each step, stands for it with the code that it lies under, and a query without a
        positive gets nothing.
        """
        draw = generator(self.seed, Purpose.HASH_TABLES, epoch, step, HashTables.QUERIES)
        order = draw.permutation(self.options.tables)
        if self.options.query == "embedding":
            return self.buckets.find(self.hashes.codes(x), order, positives, self.options.most)
        values, offsets = positives
        counts = positives.counts
        asked = np.flatnonzero(counts)
        drawn = values[offsets[asked] + draw.integers(0, counts[asked])]
        # Rows without a positive take nothing from `values`, so its offsets without them are those of the rest.
        without = Ragged(values, np.append(offsets[asked], offsets[-1]))
        found = self.buckets.find(self.buckets.codes[drawn], order, without, self.options.most)
        sizes = np.zeros(len(counts), np.int64)
        sizes[asked] = found.counts
        return Ragged.from_counts(found.values, sizes)

    def state(self) -> dict[str, np.ndarray]:
        """What a resumed run needs to go on with the same negatives, as arrays by name."""
        return {**self.buckets.state(), "touched": self.touched}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Go on from a `state`. Raises ValueError where it is that of other tables."""
        self.buckets.load(state)
        self._touched = [state["touched"].copy()]

    def _key(self, epoch: int, step: int) -> int:
        return int(generator(self.seed, Purpose.HASH_TABLES, epoch, step, HashTables.KEPT).integers(0, 2**63))
