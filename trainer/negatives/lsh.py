"""Locality-sensitive negative sampling (LNS, Algorithm 1): labels whose vectors hash as the query does."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, model_validator

from schemas.ragged import Ragged
from schemas.randomness import HashTablesStream, Purpose, generator
from trainer.negatives.base import NegativeSource, Sampled, SourceContext, SourceSection, State, ids_from, within
from trainer.negatives.hash_functions import MOST_BUCKETS, Family, open_hashes
from trainer.negatives.hash_tables import HashTables, Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from trainer.negatives.base import Vectors
    from trainer.stream.batch import Batch

    # Rows `ids` [n] of the classifier as float32 [n, D].
    ReadRows = Callable[[np.ndarray], np.ndarray]

_HASHED = 1 << 16  # rows of the classifier at a time


class LshSection(SourceSection):
    """Negatives from hash tables over the classifier's vectors (LNS)."""

    hard: int = Field(0, ge=0, description="labels a query, at most; 0: none from here")
    query: Literal["embedding", "label"] = Field(
        "embedding", description="what is hashed: x, or the vector of one positive that is drawn each step"
    )
    family: Family = "dwta"
    bits: int = Field(6, ge=1, le=15, description="K functions to a code")
    tables: int = Field(50, ge=1, description="L hash tables")
    width: int = Field(2, ge=2, description="coordinates of a bin of dwta; a table has width ** bits buckets")
    capacity: int = Field(128, ge=1, description="labels that a bucket keeps")
    policy: Policy = Field("reservoir", description="which they are: a uniform sample, or the newest")
    every: int = Field(50, ge=1, description="steps until touched rows are hashed again for the first time")
    growth: float = Field(1.1, ge=1, description="of the steps from one time to the next")

    @model_validator(mode="after")
    def _few_buckets(self) -> LshSection:
        if self.family == "dwta" and self.width**self.bits > MOST_BUCKETS:
            raise ValueError(f"negatives.lsh.width ** bits is above {MOST_BUCKETS} buckets a table: lower one of them")
        return self

    def open(self, context: SourceContext) -> HashedNegatives:
        rows, dimension = context.vectors.vectors.shape
        sampler = LshSampler(self, rows, dimension, context.seed)
        return HashedNegatives(sampler, context.vectors, context.first_epoch)


class HashedNegatives(NegativeSource):
    """Labels in the buckets of the query."""

    name = "lsh"
    stateful = True

    def __init__(self, sampler: LshSampler, vectors: Vectors, first_epoch: int = 0) -> None:
        self._sampler, self._vectors, self.first_epoch = sampler, vectors, first_epoch

    def find(self, batch: Batch, x: torch.Tensor | None = None) -> Sampled:
        assert x is not None
        batch = within(batch, self._vectors.start, self._vectors.stop)
        positives = Ragged(batch.positives, batch.positive_offsets)
        labels = self._sampler.sample(x.float().cpu().numpy(), positives, epoch=batch.epoch, step=batch.step)
        return Sampled(ids_from(labels.padded(), self._vectors.start))

    def start(self) -> None:
        self._sampler.build(self._vectors.read)

    def touch(self, rows: np.ndarray) -> None:
        self._sampler.touch(rows)

    def after_step(self, global_step: int, epoch: int, step: int) -> None:
        self._sampler.after_step(self._vectors.read, global_step, epoch=epoch, step=step)

    def state(self) -> State:
        return self._sampler.state()

    def load(self, state: State) -> None:
        self._sampler.load(state)


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


@dataclass(eq=False)
class LshSampler:
    """Hash tables over the vectors of labels [0, N), kept up with the training.

    Everything is a function of (options, seed), the vectors given, and the (epoch, step) of each call.
    """

    options: LshSection
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
        self.tables = HashTables(self.labels, hashes.tables, hashes.buckets, options.capacity, options.policy)

    def build(self, rows: ReadRows, *, epoch: int = 0, step: int = 0) -> None:
        """Hash every row anew: linear in N, once a run. No row is touched afterwards."""
        self._empty()
        self._touched.clear()
        for start in range(0, self.labels, _HASHED):
            ids = np.arange(start, min(start + _HASHED, self.labels))
            self.tables.insert(start, self.hashes.codes(rows(ids)), self._key(epoch, step))

    def touch(self, ids: np.ndarray) -> None:
        """Rows `ids` [n] were updated: they are hashed again when it is due."""
        self._touched.append(ids)

    def after_step(self, rows: ReadRows, global_step: int, *, epoch: int, step: int) -> int:
        """Hash touched rows again if it is due after `global_step` steps; return their number."""
        if not is_due(global_step, self.options.every, self.options.growth):
            return 0
        return self.rehash(rows, epoch=epoch, step=step)

    def rehash(self, rows: ReadRows, *, epoch: int, step: int) -> int:
        """Hash the touched rows again; return their number."""
        touched = self.touched
        self._touched.clear()
        for start in range(0, len(touched), _HASHED):
            ids = touched[start : start + _HASHED]
            self.tables.move(ids, self.hashes.codes(rows(ids)), self._key(epoch, step))
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
            return self.tables.find(self.hashes.codes(x), order, positives, self.options.hard)
        values, offsets = positives
        counts = positives.counts
        queries = np.flatnonzero(counts)
        drawn = values[offsets[queries] + draw.integers(0, counts[queries])]
        # Rows without a positive take nothing from `values`, so its offsets without them are those of the rest.
        without = Ragged(values, np.append(offsets[queries], offsets[-1]))
        labels = self.tables.find(self.tables.codes[drawn], order, without, self.options.hard)
        sizes = np.zeros(len(counts), np.int64)
        sizes[queries] = labels.counts
        return Ragged.from_counts(labels.values, sizes)

    def state(self) -> State:
        """Return what a resumed run needs to go on with the same negatives, as arrays by name."""
        return {**self.tables.state(), "touched": self.touched}

    def load(self, state: State) -> None:
        """Go on from a `state`. Raises ValueError where it is that of other tables."""
        self.tables.load(state)
        self._touched = [state["touched"].copy()]

    def _key(self, epoch: int, step: int) -> int:
        return int(generator(self.seed, Purpose.HASH_TABLES, epoch, step, HashTablesStream.KEPT).integers(0, 2**63))
