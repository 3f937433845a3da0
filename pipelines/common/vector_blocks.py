"""Blocks of vectors: labels [start, stop) of [0, L), the unit that is indexed, searched and discarded."""

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from schemas.errors import TableError
from schemas.manifest import Manifest
from schemas.shard_files.parquet import matrix_column, open_shard, row_groups_of
from schemas.shard_files.shards import read_group
from schemas.storage import join

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


def read_block(
    url: str, manifest: Manifest, start: int, stop: int, dimension: int, drop_bias: bool = False
) -> np.ndarray:
    """Read the vectors of labels [start, stop) as float32 [stop - start, dimension], two row groups at a time.

    Columns beyond the table's D are zeros; with `drop_bias` its last one, which meets a constant 1, is, too. Raises
    TableError: damaged, or vectors that are not finite.
    """
    _, _, first_rows = row_groups_of(manifest)
    block = np.zeros((stop - start, dimension), np.float32)
    begin = int(np.searchsorted(first_rows, start, side="right")) - 1
    end = int(np.searchsorted(first_rows, stop, side="left"))

    def fill(groups: Iterable[int]) -> None:
        for first, vectors in read_groups(url, manifest, groups):
            low, high = max(start, first), min(stop, first + len(vectors))
            rows = block[low - start : high - start, : vectors.shape[1]]
            rows[:] = vectors[low - first : high - first]
            require_finite(rows, low, url)
            if drop_bias:
                rows[:, -1] = 0

    with ThreadPoolExecutor(_READERS) as readers:
        for _ in readers.map(fill, np.array_split(np.arange(begin, end), _READERS)):
            pass
    return block


def read_groups(url: str, manifest: Manifest, groups: Iterable[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, vectors [n, D]) of the row groups `groups`, numbers in the whole table. Raises TableError."""
    shard_of, group_of, first = row_groups_of(manifest)
    for shard, of_shard in itertools.groupby(groups, key=lambda group: int(shard_of[group])):
        entry = manifest.shards[shard]
        with open_shard(url, entry) as file:
            for group in of_shard:
                rows = read_group(file, int(group_of[group]), ["vector"], join(url, entry.path))
                yield int(first[group]), matrix_column(rows, "vector")


def dimension_of(table: Manifest) -> int:
    """Return D, from the type of the `vector` column: `fixed_size_list<element: float>[64]`."""
    types = {column.name: column.type for column in table.columns}
    return int(types["vector"].rsplit("[", 1)[-1].rstrip("]"))


def require_finite(vectors: np.ndarray, first_row: int, url: str) -> None:
    """Raise TableError that names `url` and the first row of `vectors` [n, D] with an infinity or a NaN."""
    if np.isfinite(vectors).all():
        return
    row = first_row + int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
    raise TableError(
        f"{url}: the vector of row {row} is not finite, so it has no nearest neighbours. "
        "The training that wrote it has diverged: lower its learning rate and resume from an earlier checkpoint."
    )
