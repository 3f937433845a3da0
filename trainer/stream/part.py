"""Part of a table's rows: a range of them, which is as mixed as the whole, since shards are sorted by a hash."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from schemas.manifest import Manifest
from schemas.shard_files.shards import iterate_shard


class Part(NamedTuple):
    """Shares [start, stop) of [0, 1] of the rows in storage order: what lies outside is not read."""

    start: float = 0.0
    stop: float = 1.0

    def bounds(self, first_row: np.ndarray) -> np.ndarray:
        """Return the rows [first, last) within each row group, [M, 2] int64; `first_row` [M + 1] of the table."""
        start, stop = self.range(int(first_row[-1]))
        edges = np.clip([start - first_row[:-1], stop - first_row[:-1]], 0, np.diff(first_row))
        return edges.T.astype(np.int64)

    def range(self, total: int) -> tuple[int, int]:
        """Return the rows [start, stop) of a table of `total` rows."""
        start, stop = (min(total, math.floor(total * share + 1e-9)) for share in self)
        return start, stop

    def rows(self, total: int) -> int:
        """Count the rows of a table of `total` rows."""
        start, stop = self.range(total)
        return stop - start


WHOLE = Part()


def iterate_part(
    url: str, manifest: Manifest, part: Part, columns: Sequence[str] | None = None, limit: int | None = None
) -> Iterator[pa.Table]:
    """Yield the first `limit` rows of `part`, a row group at a time in storage order. Raises TableError."""
    start, stop = part.range(manifest.rows)
    stop = stop if limit is None else min(stop, start + limit)
    first = 0
    for shard in manifest.shards:
        last = first + shard.rows
        if first < stop and last > start:
            position = first
            for group in iterate_shard(url, shard, columns):
                low, high = max(start - position, 0), min(stop - position, group.num_rows)
                position += group.num_rows
                if low < high:
                    yield group.slice(low, high - low)
                if position >= stop:
                    return
        first = last
