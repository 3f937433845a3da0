"""Row blocks: the vectors of labels [start, stop) of [0, L), the unit that is indexed, searched and discarded."""

import itertools

import numpy as np

from schemas.errors import TableError
from schemas.manifest import Manifest
from schemas.parquet import matrix_column, open_shard, row_groups_of
from schemas.shards import read_group
from schemas.storage import join

MOST_ROWS = 1 << 20
MOST_BYTES = 1 << 29


def default_block_rows(dimension: int) -> int:
    """As many rows as fill 512 MiB in float32, at most 1,048,576."""
    return max(1, min(MOST_ROWS, MOST_BYTES // (4 * dimension)))


def block_bounds(labels: int, block_rows: int) -> list[tuple[int, int]]:
    """Half-open ranges that cover [0, labels) in order: as few as `block_rows` allows, sizes equal to within one."""
    count = -(-labels // block_rows)
    edges = [labels * block // count for block in range(count + 1)]
    return list(itertools.pairwise(edges))


def read_block(url: str, manifest: Manifest, start: int, stop: int) -> np.ndarray:
    """Vectors of labels [start, stop) as float32 [stop - start, D], read one row group at a time.

    Raises TableError: damaged, or vectors that are not finite.
    """
    shard_of, group_of, first = row_groups_of(manifest)
    block: np.ndarray | None = None
    begin = int(np.searchsorted(first, start, side="right")) - 1
    end = int(np.searchsorted(first, stop, side="left"))
    for shard in np.unique(shard_of[begin:end]):
        entry = manifest.shards[shard]
        place = join(url, entry.path)
        with open_shard(url, entry) as file:
            for m in range(begin, end):
                if shard_of[m] != shard:
                    continue
                rows = matrix_column(read_group(file, int(group_of[m]), ["vector"], place), "vector")
                if block is None:
                    block = np.empty((stop - start, rows.shape[1]), np.float32)
                low, high = max(start, int(first[m])), min(stop, int(first[m + 1]))
                block[low - start : high - start] = rows[low - first[m] : high - first[m]]
    assert block is not None
    require_finite(block, start, url)
    return block


def require_finite(vectors: np.ndarray, first_row: int, url: str) -> None:
    """Raises TableError that names `url` and the first row of `vectors` [n, D] with an infinity or a NaN."""
    if np.isfinite(vectors).all():
        return
    row = first_row + int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
    raise TableError(
        f"{url}: the vector of row {row} is not finite, so it has no nearest neighbours. "
        "The training that wrote it has diverged: lower its learning rate and resume from an earlier checkpoint."
    )
