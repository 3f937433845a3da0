"""Part of a table's rows: an equal share of every row group, so that any part is as mixed as the whole."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from schemas.manifest import Manifest
from schemas.shard_files.shards import iterate


class Part(NamedTuple):
    """Shares [start, stop) of [0, 1] of every row group: shards are sorted by a hash, so any rows are random ones."""

    start: float = 0.0
    stop: float = 1.0

    def bounds(self, first_row: np.ndarray) -> np.ndarray:
        """Return the rows [first, last) within each row group, [M, 2] int64; `first_row` [M + 1] of the table.

        All row groups together have the exact share: what one rounds down, a later one makes up for.
        """
        rows = np.diff(first_row)
        edges = [np.minimum(np.diff(np.floor(first_row * share + 1e-9).astype(np.int64)), rows) for share in self]
        return np.stack([np.minimum(*edges), edges[1]], axis=1)

    def rows(self, total: int) -> int:
        """Count the rows of a table of `total` rows in one row group."""
        first, last = self.bounds(np.array([0, total]))[0]
        return int(last - first)


WHOLE = Part()


def iterate_part(
    url: str, manifest: Manifest, part: Part, columns: Sequence[str] | None = None, limit: int | None = None
) -> Iterator[pa.Table]:
    """Yield the first `limit` rows of `part`, a row group at a time in storage order. Raises TableError."""
    first, left = 0, manifest.rows if limit is None else limit
    for group in iterate(url, manifest, columns):
        start, stop = part.bounds(np.array([first, first + group.num_rows]))[0]
        first += group.num_rows
        if left <= 0:
            return
        if start < stop:
            yield group.slice(start, min(stop - start, left))
            left -= stop - start
