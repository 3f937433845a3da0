"""Blocks of vectors: labels [start, stop) of [0, L), the unit that is indexed, searched and discarded."""

import itertools

import numpy as np

from schemas.errors import TableError
from schemas.manifest import Manifest
from schemas.shard_files.parquet import matrix_column, open_shard, row_groups_of
from schemas.shard_files.shards import read_group
from schemas.storage import join


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
    """Read the vectors of labels [start, stop) as float32 [stop - start, dimension], one row group at a time.

    Columns beyond the table's D are zeros; with `drop_bias` its last one, which meets a constant 1, is, too. Raises
    TableError: damaged, or vectors that are not finite.
    """
    shard_of, group_of, first = row_groups_of(manifest)
    block = np.zeros((stop - start, dimension), np.float32)
    begin = int(np.searchsorted(first, start, side="right")) - 1
    end = int(np.searchsorted(first, stop, side="left"))
    for shard in np.unique(shard_of[begin:end]):
        entry = manifest.shards[shard]
        place = join(url, entry.path)
        with open_shard(url, entry) as file:
            for m in np.flatnonzero(shard_of[begin:end] == shard) + begin:
                rows = matrix_column(read_group(file, int(group_of[m]), ["vector"], place), "vector")
                low, high = max(start, int(first[m])), min(stop, int(first[m + 1]))
                rows = rows[low - first[m] : high - first[m]]
                require_finite(rows, low, url)
                block[low - start : high - start, : rows.shape[1]] = rows
                if drop_bias:
                    block[low - start : high - start, rows.shape[1] - 1] = 0
    return block


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
