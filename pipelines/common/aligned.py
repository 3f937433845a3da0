"""Points and their embeddings, read side by side in batches of a fixed number of rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.common.vector_blocks import require_finite
from schemas.errors import TableError
from schemas.randomness import sample_rows
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from search.block import padded
from search.exclusions import Exclusions


class Batch(NamedTuple):
    """Rows [first, first + B) of a shard: their `ids`, `queries` float32 [B, D] and the labels to drop for each."""

    first: int
    ids: pa.Array
    queries: np.ndarray
    exclusions: Exclusions


@dataclass(frozen=True)
class Source:
    """Points that get negatives: `queries`, or `labels` where label texts are training points."""

    name: str
    queries: Table
    embeddings: Table

    @property
    def id_column(self) -> str:
        """Name of the column of ids."""
        return self.queries.id_column

    def batches(self, shard: int, rows: int, dimension: int) -> Iterator[Batch]:
        """Read shard `shard` in batches of `rows` rows, the last may be shorter; columns of zeros up to `dimension`.

        Raises TableError: damaged, embeddings that are not those of these rows, or that are not finite.
        """
        first = sum(entry.rows for entry in self.queries.shards[:shard])
        within = 0
        columns = [self.id_column, "label_ids", "filter_label_ids"]
        for table in rechunk(self.aligned(shard, columns), rows):
            queries = matrix_column(table, "vector")
            require_finite(queries, first + within, self.embeddings.url)
            ids = table.column(self.id_column).combine_chunks()
            yield Batch(within, ids, padded(queries, dimension), Exclusions.of(table))
            within += table.num_rows

    def id_batches(self, shard: int, rows: int) -> Iterator[pa.Array]:
        """Read the `query_id` column of shard `shard`, int64, in batches of `rows` rows."""
        tables = self.queries.batches_of(shard, [self.id_column])
        for table in rechunk(tables, rows):
            yield table.column(self.id_column).combine_chunks()

    def some_queries(self, rows: int, seed: int, dimension: int, groups: int = 8) -> np.ndarray:
        """Read about `rows` embeddings float32 [S, D] of a few row groups: the same for the same seed."""
        picked = sample_rows(len(self.embeddings.groups), groups, seed)
        each = -(-rows // len(picked)) if len(picked) else 0
        parts = [np.empty((0, dimension), np.float32)]
        for first, vectors in self.embeddings.vectors(picked):
            require_finite(vectors[:each], first, self.embeddings.url)
            parts.append(padded(vectors[:each], dimension))
        return np.concatenate(parts)

    def aligned(self, shard: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read row groups of shard `shard` with a column `vector`, and `columns` of the points, or all.

        Raises TableError: damaged, or embeddings that are not those of these rows.
        """
        columns = [name for name in self.queries.columns if columns is None or name in columns]
        for point, embedding in self.queries.aligned_with(self.embeddings, shard, columns):
            yield point.append_column("vector", embedding.column("vector"))


def open_source(name: str, queries: Table, embeddings: Table) -> Source:
    """Return `embeddings` beside their rows. Raises TableError: of other data, or not aligned."""
    embeddings.require_made_from("queries", queries)
    if embeddings.cut != queries.cut:
        shape, expected = ([shard.rows for shard in table.shards] for table in (embeddings, queries))
        raise TableError(
            f"{embeddings.url}: not aligned with {queries.url}: its shards hold {shape} rows in row groups of "
            f"{embeddings.manifest.row_group_rows}, expected {expected} in row groups of "
            f"{queries.manifest.row_group_rows}. Make the embeddings again."
        )
    return Source(name, queries, embeddings)


def rechunk(tables: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Yield the same rows in tables of exactly `rows` rows, each in one piece; the last may be shorter."""
    pending: list[pa.Table] = []
    held = 0
    for table in tables:
        pending.append(table)
        held += table.num_rows
        if held < rows:
            continue
        ready = pa.concat_tables(pending)
        full = held - held % rows
        for start in range(0, full, rows):
            yield ready.slice(start, rows).combine_chunks()
        pending, held = [ready.slice(full)], held - full
    if held:
        yield pa.concat_tables(pending).combine_chunks()
