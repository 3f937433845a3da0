"""Layout of clusters in a table: pure arithmetic, so that every worker knows the place of every row.

Clusters are shuffled, because a row group of near ones would be a large cluster itself. Every row group holds whole
clusters of one size: those of C rows fill row groups of a multiple of C; the few of C - 1, fewer than C to each part,
stand in shards of one row group each at the end, with fewer than C clusters, so that the rows of a row group tell what
is in it: there are ceil(rows / C).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schemas.errors import InputError
from schemas.randomness import Purpose, generator

_GROUP_CLUSTERS = 16  # in a row group, at least


@dataclass(frozen=True)
class Layout:
    """Layout of a table: `rows` C of a full cluster; the clusters of C and of C - 1 rows of each part, [parts] both.

    Row groups have `row_group_rows` rows, shards of full clusters `shard_rows`, both multiples of C.
    """

    rows: int
    full: tuple[int, ...]
    short: tuple[int, ...]
    row_group_rows: int
    shard_rows: int
    seed: int

    @property
    def clusters(self) -> int:
        """Number of all clusters."""
        return sum(self.full) + sum(self.short)

    @property
    def full_shards(self) -> int:
        """Shards with clusters of C rows: they come first."""
        return -(-sum(self.full) * self.rows // self.shard_rows)

    @property
    def shards(self) -> int:
        """Number of all shards."""
        return self.full_shards + -(-sum(self.short) // self.short_a_shard)

    @property
    def short_a_shard(self) -> int:
        """Clusters of C - 1 rows in a shard."""
        return max(1, min(self.row_group_rows // max(1, self.rows - 1), self.rows - 1))

    def rows_of(self, shard: int) -> int:
        """Return the rows of shard `shard`."""
        if shard < self.full_shards:
            return min(self.shard_rows, sum(self.full) * self.rows - shard * self.shard_rows)
        before = (shard - self.full_shards) * self.short_a_shard
        return min(self.short_a_shard, sum(self.short) - before) * (self.rows - 1)

    def first_row(self, shard: int) -> int:
        """Return the id of the first row of shard `shard`."""
        if shard < self.full_shards:
            return shard * self.shard_rows
        before = (shard - self.full_shards) * self.short_a_shard
        return sum(self.full) * self.rows + before * (self.rows - 1)

    def places(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (shard, row within it) int64 [n] of the rows of a part, cluster after cluster, those of C first."""
        full = self._slots[0][sum(self.full[:part]) : sum(self.full[: part + 1])]
        short = self._slots[1][sum(self.short[:part]) : sum(self.short[: part + 1])]
        starts = full * self.rows
        before, within = np.divmod(short, self.short_a_shard)
        shard = np.concatenate(
            [np.repeat(starts // self.shard_rows, self.rows), np.repeat(self.full_shards + before, self.rows - 1)]
        )
        return shard, np.concatenate(
            [_runs(starts % self.shard_rows, self.rows), _runs(within * (self.rows - 1), self.rows - 1)]
        )

    @cached_property
    def _slots(self) -> tuple[np.ndarray, np.ndarray]:
        """Places of clusters among their like, part after part: of those of C rows, and of the others."""
        draw = generator(self.seed, Purpose.SAMPLE)
        return draw.permutation(sum(self.full)), draw.permutation(sum(self.short))


def make_layout(points: list[int], size: int, row_group_rows: int, shard_rows: int, seed: int) -> Layout:
    """Lay out parts with so many `points` each, in clusters of at most `size`, equal within one over all parts.

    `row_group_rows` and `shard_rows` of the table that is reordered: the new one is cut about alike. Raises InputError
    where a part has too few points for clusters that are as equal as those of the others.
    """
    counts = [-(-count // size) for count in points]
    rows = max((-(-count // clusters) for count, clusters in zip(points, counts, strict=True) if clusters), default=1)
    short = [clusters * rows - count for count, clusters in zip(points, counts, strict=True)]
    for lacking, clusters, count in zip(short, counts, points, strict=True):
        if lacking > clusters:
            raise InputError(
                f"--size {size}: a part of {count:,} queries is too small for clusters of {rows} and {rows - 1}. Give "
                "a smaller --size, or larger parts (--memory, --part-rows)."
            )
    full = [clusters - lacking for clusters, lacking in zip(counts, short, strict=True)]
    group = max(_GROUP_CLUSTERS, round(row_group_rows / rows)) * rows
    return Layout(rows, tuple(full), tuple(short), group, -(-shard_rows // group) * group, seed)


def _runs(starts: np.ndarray, length: int) -> np.ndarray:
    """Return [start, start + length) of every start, laid end to end."""
    return (starts[:, None] + np.arange(length)).reshape(-1)
