"""Shares of a split's rows by the hash of the key: who is in a share depends on the key alone, not on where rows lie.

`extremis shard` orders the rows of a shard by the salted hash of their keys, so a share is one range of each shard.
The ends of the range are found by reading the keys of a few row groups.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate, count, pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from schemas.errors import TableError
from schemas.hashing import hash_strings
from schemas.manifest import Shard, shard_url
from schemas.ragged import offsets_of
from schemas.storage import resolve
from schemas.table import Table

_THREADS = 16
_HALF = 32  # the high bits of a hash order the rows; the low bits choose the shard


class RowShare(NamedTuple):
    """Rows of a split whose keys have hashes in [start, stop), as fractions of the hashes that the split has.

    `shard --test` and `--validation` leave the training split only part of all hashes (`hash_range`). Methods that
    look for rows raise TableError if the rows of a shard are not in the order of the hashes; StorageError.
    """

    start: float = 0.0
    stop: float = 1.0

    def bounds(self, table: Table) -> np.ndarray:
        """Return the rows [first, last) within each row group, [M, 2] int64."""
        groups, first = table.groups, offsets_of(np.array([entry.rows for entry in table.shards], np.int64))[:-1]
        edges = np.array([(first + rows_below(table, edge))[groups.shard] for edge in self])
        return np.clip(edges - groups.first[:-1], 0, np.diff(groups.first)).T

    def rows(self, table: Table) -> int:
        """Return the number of rows."""
        return table.rows if self == ALL_ROWS else int(np.diff(self.bounds(table)).sum())

    def first(self, table: Table, rows: int) -> "RowShare":
        """Return the beginning of this range of hashes that has about `rows` rows; this share if it has fewer."""
        total = self.rows(table)
        return self if total <= rows else RowShare(self.start, self.start + (self.stop - self.start) * rows / total)

    def ids(self, table: Table, limit: int | None = None) -> np.ndarray:
        """Return the row numbers, int64, of the rows that `batches` yields."""
        numbers = [np.empty(0, np.int64)]
        for number, first, last in self._pieces(table, limit):
            numbers.append(int(table.groups.first[number]) + np.arange(first, last))
        return np.concatenate(numbers)

    def batches(
        self, table: Table, columns: Sequence[str] | None = None, limit: int | None = None
    ) -> Iterator[pa.Table]:
        """Yield these rows, or `limit` of them, one row group at a time in storage order.

        Each part of a version gives its share of the limit, from the beginning of the part. Raises TableError.
        """
        pieces = [*self._pieces(table, limit)]
        groups = table.read_groups([number for number, _, _ in pieces], columns)
        for (_, first, last), (_, rows) in zip(pieces, groups, strict=True):
            yield rows if last - first == rows.num_rows else rows.slice(first, last - first)

    def _pieces(self, table: Table, limit: int | None) -> Iterator[tuple[int, int, int]]:
        """Yield (row group, first row, end) of the rows, without empty pieces."""
        bounds = self.bounds(table)
        counts = [np.diff(of_part)[:, 0] for of_part in _by_part(table, bounds)]
        budgets = allot([int(rows.sum()) for rows in counts], limit)
        taken = [np.clip(left - offsets_of(rows)[:-1], 0, rows) for left, rows in zip(budgets, counts, strict=True)]
        for number, (first, rows) in enumerate(zip(bounds[:, 0].tolist(), np.concatenate(taken).tolist(), strict=True)):
            if rows:
                yield number, first, first + rows

    def fitting(self, table: Table, costs: np.ndarray, budget: float) -> int:
        """Return how many of these rows fit into `budget`, if `batches` limits them; `costs` [rows] of all."""
        parts = [int(np.diff(of_part).sum()) for of_part in _by_part(table, self.bounds(table))]
        first, ends = offsets_of(np.array(parts, np.int64))[:-1], np.concatenate([[0], np.cumsum(costs)])

        def cost(rows: int) -> float:
            return float((ends[first + allot(parts, rows)] - ends[first]).sum())

        return max(0, bisect.bisect_right(range(len(costs) + 1), budget, key=cost) - 1)


ALL_ROWS = RowShare()


def allot(rows: Sequence[int], budget: int | None) -> list[int]:
    """Divide a `budget` of rows among parts with these numbers of rows, in proportion; None: all rows."""
    total = sum(rows)
    ends = [min(total if budget is None else budget, total) * end // max(1, total) for end in (0, *accumulate(rows))]
    return [stop - start for start, stop in pairwise(ends)]


def _by_part(table: Table, groups: np.ndarray) -> list[np.ndarray]:
    """Divide values of all row groups [M, ...] among the parts of a version."""
    return np.split(groups, np.searchsorted(table.groups.shard, [part.stop for part in table.parts[:-1]]))


def hash_range(table: Table) -> tuple[float, float]:
    """Return the range [low, high) of hashes, scaled to [0, 1), that a split of a data set has. Raises TableError."""
    root, split = resolve(table.url, "../.."), table.url.rstrip("/").rpartition("/")[2]
    options = Table.open(root, "data").parameters.get("options", {})
    val = options.get("validation_share", 0.0)
    test = val + options.get("test_share", 0.0)
    low, high = {"val": (0.0, val), "test": (val, test), "train": (test, 1.0)}.get(split, (0.0, 1.0))
    by_key = options.get("group", "off") == "off"  # else, groups were held out by another hash
    return (low, high) if by_key and low < high else (0.0, 1.0)


def seed_of(table: Table) -> int:
    """Return the salt of the hashes of a table's keys."""
    return int(table.parameters.get("seed", 0))


def rows_below(table: Table, fraction: float) -> np.ndarray:
    """Return how many rows of each shard have hashes below `fraction` of the split's hashes, int64 [shards].

    Reads the keys of one or two row groups per shard; a process reads them once.
    """
    rows = np.array([entry.rows for entry in table.shards], np.int64)
    if not 0 < fraction < 1:
        return rows if fraction >= 1 else np.zeros_like(rows)
    low, high = hash_range(table)
    threshold, seed = math.ceil((low + (high - low) * fraction) * 2**_HALF), seed_of(table)

    def below(shard: int) -> int:
        return _count_below(table.url, table.shards[shard], table.manifest.group_rows(shard), seed, threshold, fraction)

    with ThreadPoolExecutor(_THREADS) as pool:
        return np.fromiter(pool.map(below, range(len(rows))), np.int64, len(rows))


@lru_cache(maxsize=1 << 16)
def _count_below(
    url: str, shard: Shard, groups: int | tuple[int, ...], seed: int, threshold: int, fraction: float
) -> int:
    """Count the rows of a shard with the high bits of the hash below `threshold`, near `fraction` of its rows."""
    from schemas.shard_files.shards import open_shard, read_group  # opening a table needs no Parquet reader

    sizes = np.minimum(groups, shard.rows - np.arange(0, shard.rows, groups)) if isinstance(groups, int) else groups
    first, place = offsets_of(np.asarray(sizes, np.int64)), shard_url(url, shard)
    low, high = 0, len(first) - 1  # the end of the rows is in row groups [low, high)
    number = int(np.searchsorted(first, fraction * shard.rows, "right")) - 1
    with open_shard(url, shard) as file:
        for attempt in count():
            if low == high:
                break
            number = min(max(number, low), high - 1)
            hashes = hash_strings(read_group(file, number, ["key"], place).column("key"), seed)
            if (hashes[1:] < hashes[:-1]).any():
                raise TableError(
                    f"{place}: the rows are not in the order of the hashes of their keys, by which rows are held out. "
                    "Shard the data again."
                )
            below = int(np.searchsorted(hashes >> np.uint64(_HALF), threshold))
            if 0 < below < len(hashes):
                return int(first[number]) + below
            low, high = (number + 1, high) if below else (low, number)
            number = number + (1 if below else -1) if attempt == 0 else (low + high) // 2
    return int(first[low])
