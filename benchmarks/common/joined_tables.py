"""Synthetic queries and mined negatives, as tables of `shard` and `mine`, and as records for other loaders.

Made in vectorised form, one row group at a time; equal sizes give equal bytes on any machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.options import default_shards
from schemas import arrow
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest, Shard, columns_of, publish, unpublish
from schemas.shard_files.parquet import list_array, matrix_array, writing_shard
from schemas.storage import join
from schemas.table import Table
from trainer.stream import Source

LABELS = 1_000_000
VOCABULARY = 30_000
POSITIVES = 5
LEAST_TOKENS, MOST_TOKENS = 8, 24
EPOCH = 2
_SHARD_BYTES = 128 << 20
_BYTES_A_ROW = 40  # bytes per row of queries on storage, which gives the number of shards
_MAKE = 8192  # rows made at a time, independent of row groups


@dataclass(frozen=True)
class JoinedTables:
    """`rows` queries and their `width` negatives each, out of `labels`, under `root`; `group` rows per row group."""

    root: str
    rows: int
    width: int = 50
    group: int = 8192
    seed: int = 0
    labels: int = LABELS

    @property
    def queries(self) -> str:
        return DataLayout(self.root).queries("train")

    @property
    def negatives(self) -> str:
        return RunLayout(join(self.root, "run")).negatives(EPOCH, "queries")

    def write(self) -> None:
        """Publish both tables."""
        ids = arrow.label_type(self.labels)
        schemas = (arrow.queries(arrow.token_type(VOCABULARY), ids), arrow.negatives(self.width, ids))
        for url in (self.queries, self.negatives):
            unpublish(url)
        count = default_shards(self.rows, self.rows * _BYTES_A_ROW, _SHARD_BYTES)
        edges = [self.rows * number // count for number in range(count + 1)]
        entries: tuple[list[Shard], list[Shard]] = ([], [])
        for number in range(count):
            with (
                writing_shard(self.queries, number, count, schemas[0], self.group) as queries,
                writing_shard(self.negatives, number, count, schemas[1], self.group) as negatives,
            ):
                for points, mined in self.pieces(edges[number], edges[number + 1]):
                    queries.write(points)
                    negatives.write(mined)
            entries[0].append(queries.entry)
            entries[1].append(negatives.entry)
        manifest = self._publish(self.queries, "queries", schemas[0], entries[0], {})
        self._publish(self.negatives, "negatives", schemas[1], entries[1], {"queries": manifest.digest})

    def open(self, root: str | None = None) -> Source:
        """Open the queries joined with their negatives; `root`: another URL of the same files."""
        where = replace(self, root=root) if root else self
        return Source("queries", Table.open(where.queries, "queries")).with_negatives(where.negatives)

    def files(self) -> tuple[list[str], list[str]]:
        """Return the local paths of the shards of queries and of the shards of negatives, in the same order."""
        source = self.open()
        assert source.negatives is not None
        queries, negatives = (
            [join(table.url, shard.path) for shard in table.manifest.shards]
            for table in (source.table, source.negatives)
        )
        return queries, negatives

    def pieces(self, start: int, stop: int) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield queries and negatives of rows [start, stop), in pieces of up to 8,192 rows."""
        for first in range(start - start % _MAKE, stop, _MAKE):
            queries, negatives = self._make(first)
            low, high = max(start, first) - first, min(stop, first + _MAKE) - first
            yield queries.slice(low, high - low), negatives.slice(low, high - low)

    def _publish(
        self, url: str, kind: str, schema: pa.Schema, shards: list[Shard], parents: dict[str, str]
    ) -> Manifest:
        manifest = Manifest(
            kind=kind,
            columns=columns_of(schema),
            shards=tuple(shards),
            rows=self.rows,
            row_group_rows=self.group,
            id_range=(0, self.rows),
            parents=parents,
        )
        return publish(url, manifest)

    def _make(self, first: int) -> tuple[pa.Table, pa.Table]:
        """Draw queries and negatives of rows [first, first + 8,192)."""
        draw = np.random.default_rng([self.seed, first])
        ids = np.arange(first, first + _MAKE)
        lengths = draw.integers(LEAST_TOKENS, MOST_TOKENS + 1, _MAKE)
        # Log-uniform numbers follow Zipf's law with exponent 1.
        tokens = np.exp(draw.random(int(lengths.sum())) * np.log(VOCABULARY)).astype(np.uint16) - 1
        # Sorted draws plus 0, 1, 2, ... are distinct; some are the positives, the others the negatives.
        count = POSITIVES + self.width
        labels = np.sort(draw.integers(0, self.labels - count, (_MAKE, count)), axis=1) + np.arange(count)
        labels = draw.permuted(labels, axis=1)
        scores = -np.sort(draw.random((_MAKE, self.width), np.float32), axis=1)
        label_type = arrow.label_type(self.labels)
        queries = {
            "query_id": pa.array(ids),
            "key": pc.utf8_lpad(pa.array(ids).cast(pa.string()), 10, "0"),
            "input_ids": list_array(tokens, np.concatenate([[0], np.cumsum(lengths)]), pa.uint16()),
            "label_ids": list_array(
                np.sort(labels[:, :POSITIVES], axis=1).reshape(-1), np.arange(_MAKE + 1) * POSITIVES, label_type
            ),
        }
        negatives = {
            "query_id": pa.array(ids),
            "label_ids": matrix_array(labels[:, POSITIVES:], label_type),
            "scores": matrix_array(scores.astype(np.float32), pa.float32()),
        }
        return (
            pa.table(queries, schema=arrow.queries(pa.uint16(), label_type)),
            pa.table(negatives, schema=arrow.negatives(self.width, label_type)),
        )
