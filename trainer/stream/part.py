"""Part of a table's rows: an equal share of every row group, so that any part is as mixed as the whole."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from schemas.manifest import Manifest
from schemas.shard_files.parquet import row_groups_of
from schemas.shard_files.shards import iterate

_PLACES = 1 << 48
_GOLDEN = (5**0.5 - 1) / 2  # whose multiples are spread evenly over [0, 1)


class Part(NamedTuple):
    """Shares [start, stop) of [0, 1] of every row group: shards are sorted by a hash, so any rows are random ones."""

    start: float = 0.0
    stop: float = 1.0

    def bounds(self, first_row: np.ndarray) -> np.ndarray:
        """Return the rows [first, last) within each row group, [M, 2] int64; `first_row` [M + 1] of the table.

        All row groups together have the exact share: what one rounds down, another makes up for. A greater share has
        every row of a smaller one, so parts that do not meet in [0, 1] have no row in common.
        """
        rows = np.diff(first_row)
        return np.stack([_spread(rows, self._count(share, int(first_row[-1]))) for share in self], axis=1)

    def rows(self, total: int) -> int:
        """Count the rows of a table of `total` rows."""
        return self._count(self.stop, total) - self._count(self.start, total)

    @staticmethod
    def _count(share: float, total: int) -> int:
        return min(total, math.floor(total * share + 1e-9))


WHOLE = Part()


def iterate_part(
    url: str, manifest: Manifest, part: Part, columns: Sequence[str] | None = None, limit: int | None = None
) -> Iterator[pa.Table]:
    """Yield the first `limit` rows of `part`, a row group at a time in storage order. Raises TableError."""
    left = manifest.rows if limit is None else limit
    bounds = None if part == WHOLE else part.bounds(row_groups_of(manifest)[2])
    for number, group in enumerate(iterate(url, manifest, columns)):
        if left <= 0:
            return
        start, stop = (0, group.num_rows) if bounds is None else bounds[number].tolist()
        if start < stop:
            yield group.slice(start, min(stop - start, left))
            left -= stop - start


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    """Return how many rows of each row group are among `count` of them all: [M] rows -> [M] int64.

    Row j of group g has the place (j + u) / rows[g], u in [0, 1) by g, and the first `count` places are taken.
    """
    offset = np.arange(len(rows)) * _GOLDEN % 1

    def before(place: int) -> np.ndarray:
        return np.ceil(rows * (place / _PLACES) - offset).astype(np.int64)

    low, high = 0, _PLACES
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if before(middle).sum() <= count else (low, middle)
    taken = before(low)
    more = np.flatnonzero(before(high) > taken)[: count - int(taken.sum())]
    taken[more] += 1
    return taken
