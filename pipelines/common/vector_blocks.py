"""Blocks of vectors: labels [start, stop) of [0, L), the unit that is indexed, searched and discarded."""

import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from schemas.errors import TableError
from schemas.table import Table

_READERS = 2  # threads: each holds a row group, before there is an index and queries


def equal_ranges(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """Cut [start, stop) into `count` half-open ranges in order, sizes equal to within one: range g of G for rank g."""
    edges = [start + (stop - start) * part // count for part in range(count + 1)]
    return list(itertools.pairwise(edges))


def block_bounds(labels: int, ranges: int, block_rows: int) -> list[list[tuple[int, int]]]:
    """Cut each of `ranges` equal label ranges into as few blocks as `block_rows` allows, equal to within one."""
    return [
        equal_ranges(start, stop, -(-(stop - start) // block_rows)) for start, stop in equal_ranges(0, labels, ranges)
    ]


def read_block(table: Table, start: int, stop: int, dimension: int, drop_bias: bool = False) -> np.ndarray:
    """Read the vectors of labels [start, stop) as float32 [stop - start, dimension], two row groups at a time.

    Columns beyond the table's D are zeros; with `drop_bias` its last one, which meets a constant 1, is, too. Raises
    TableError: damaged, or vectors that are not finite.
    """
    block = np.zeros((stop - start, dimension), np.float32)
    begin = int(table.groups.of_rows(np.array(start)))
    end = int(np.searchsorted(table.groups.first, stop, side="left"))

    def fill(groups: Iterable[int]) -> None:
        for first, vectors in table.vectors(groups):
            low, high = max(start, first), min(stop, first + len(vectors))
            rows = block[low - start : high - start, : vectors.shape[1]]
            rows[:] = vectors[low - first : high - first]
            require_finite(rows, low, table.url)
            if drop_bias:
                rows[:, -1] = 0

    with ThreadPoolExecutor(_READERS) as readers:
        for _ in readers.map(fill, np.array_split(np.arange(begin, end), _READERS)):
            pass
    return block


def require_finite(vectors: np.ndarray, first_row: int, url: str) -> None:
    """Raise TableError that names `url` and the first row of `vectors` [n, D] with an infinity or a NaN."""
    if np.isfinite(vectors).all():
        return
    row = first_row + int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
    raise TableError(
        f"{url}: the vector of row {row} is not finite, so it has no nearest neighbours. "
        "The training that wrote it has diverged: lower its learning rate and resume from an earlier checkpoint."
    )
