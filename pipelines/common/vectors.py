"""Read vectors from tables for search: blocks of labels, and points with their embeddings.

A block is a range of labels [start, stop) in [0, L). Each block is indexed, searched and discarded as a unit.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from schemas.errors import TableError
from schemas.randomness import sample_rows
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table, rechunk
from search.block import pad_vectors
from search.exclusions import Exclusions

_MOST = np.float32(1e17)  # bound on the numbers of vectors, so that scores are finite in float32


class QueryBatch(NamedTuple):
    """Rows [first, first + B) of a shard: `ids`, `queries` float32 [B, D], and the labels to exclude for each row.

    `weakest` float32 [B]: the lowest score among each row's positives, if a margin needs it.
    """

    first: int
    ids: pa.Array
    queries: np.ndarray
    exclusions: Exclusions
    weakest: np.ndarray = np.empty(0, np.float32)


@dataclass(frozen=True)
class EmbeddedSource:
    """Points for which negatives are mined: `queries`, or `labels` if label texts are training points."""

    name: str
    queries: Table
    embeddings: Table
    ids_of: str = "labels"  # kind of the ids to search; among "points", a point does not find itself

    def batches(self, shard: int, rows: int, dimension: int) -> Iterator[QueryBatch]:
        """Read shard `shard` in batches of `rows` rows (the last may be shorter), with vectors padded to `dimension`.

        Raises TableError if a table is damaged, a vector is not finite, or the embeddings belong to other rows.
        """
        first = sum(entry.rows for entry in self.queries.shards[:shard])
        within = 0
        columns = [self.queries.id_column, *(("label_ids", "filter_label_ids") if self.ids_of == "labels" else ())]
        for table in rechunk(self.aligned(shard, columns), rows):
            queries = matrix_column(table, "vector")
            require_finite(queries, first + within, self.embeddings.url)
            ids = table.column(self.queries.id_column).combine_chunks()
            yield QueryBatch(within, ids, pad_vectors(queries, dimension), Exclusions.of(table))
            within += table.num_rows

    def sample_queries(self, rows: int, seed: int, dimension: int, groups: int = 8) -> np.ndarray:
        """Read about `rows` embeddings float32 [S, D] from a few row groups; the choice depends only on the seed."""
        picked = sample_rows(len(self.embeddings.groups), groups, seed)
        each = -(-rows // len(picked)) if len(picked) else 0
        parts = [np.empty((0, dimension), np.float32)]
        for first, vectors in self.embeddings.vectors(picked):
            require_finite(vectors[:each], first, self.embeddings.url)
            parts.append(pad_vectors(vectors[:each], dimension))
        return np.concatenate(parts)

    def aligned(self, shard: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read the row groups of shard `shard` with a column `vector` and `columns` of the points (None: all columns).

        Raises TableError if a table is damaged or the embeddings belong to other rows.
        """
        columns = [name for name in self.queries.columns if columns is None or name in columns]
        for point, embedding in self.queries.aligned_with(self.embeddings, shard, columns):
            yield point.append_column("vector", embedding.column("vector"))


def open_source(name: str, queries: Table, embeddings: Table) -> EmbeddedSource:
    """Pair `queries` with `embeddings`. Raises TableError if the embeddings are of other data or not aligned."""
    embeddings.require_aligned(queries, "Compute the embeddings again.")
    return EmbeddedSource(name, queries, embeddings)


_READERS = 2  # threads; each has a row group in memory, before the index and the queries are loaded


def equal_ranges(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """Split [start, stop) into `count` consecutive ranges whose sizes differ by at most one; rank g uses range g."""
    edges = [start + (stop - start) * part // count for part in range(count + 1)]
    return list(itertools.pairwise(edges))


def block_bounds(labels: int, ranges: int, block_rows: int) -> list[list[tuple[int, int]]]:
    """Split each of `ranges` equal label ranges into as few blocks of equal size as `block_rows` allows."""
    return [
        equal_ranges(start, stop, -(-(stop - start) // block_rows)) for start, stop in equal_ranges(0, labels, ranges)
    ]


def read_block(table: Table, start: int, stop: int, dimension: int, drop_bias: bool = False) -> np.ndarray:
    """Read the vectors of labels [start, stop) as float32 [stop - start, dimension], two row groups at a time.

    Columns beyond the table's dimension D are filled with zeros. With `drop_bias`, the table's last column, which is a
    constant bias, is also set to zero. Raises TableError if the table is damaged or a vector is not finite.
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
    """Raise TableError that names `url` and the first row of `vectors` [n, D] whose scores may not be finite."""
    if np.abs(vectors).max(initial=0) < _MOST:  # False for NaN
        return
    row = first_row + int(np.flatnonzero(~(np.abs(vectors).max(axis=1) < _MOST))[0])
    raise TableError(
        f"{url}: the vector of row {row} is not finite, or contains {_MOST:.0e} or more, so that scores may be "
        "infinite or NaN. If training has diverged, lower the learning rate, and resume from an earlier checkpoint; "
        "otherwise scale the vectors to length 1."
    )
