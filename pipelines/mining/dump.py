"""What a training run left for mining: vectors, and embeddings aligned with the queries that they embed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.mining.blocks import require_finite
from pipelines.mining.exclusions import Exclusions
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout, RunLayout, parse_number
from schemas.manifest import Manifest, is_published, open_manifest, require_parent
from schemas.parquet import matrix_column
from schemas.shards import iterate_shard
from schemas.storage import join


class Batch(NamedTuple):
    """Rows [first, first + B) of a shard: `queries` float32 [B, D] and what to drop for each."""

    first: int
    queries: np.ndarray
    exclusions: Exclusions


@dataclass(frozen=True)
class Source:
    """Points that get negatives: `queries`, or `labels` where label texts are training points."""

    name: str
    queries_url: str
    queries: Manifest
    embeddings_url: str
    embeddings: Manifest

    @property
    def id_column(self) -> str:
        return "label_id" if self.queries.kind == "labels" else "query_id"

    def batches(self, shard: int, rows: int) -> Iterator[Batch]:
        """Shard `shard` in batches of whole row groups, of at least `rows` rows but for the last.

        Raises TableError: damaged, embeddings that are not those of these rows, or that are not finite.
        """
        first = sum(entry.rows for entry in self.queries.shards[:shard])
        within = 0
        for table in _at_least(rows, self._aligned(shard)):
            queries = matrix_column(table, "vector").astype(np.float32)
            require_finite(queries, first + within, self.embeddings_url)
            yield Batch(within, queries, Exclusions.of(table))
            within += table.num_rows

    def ids(self, shard: int) -> pa.Array:
        """The `query_id` column of shard `shard`, int64."""
        tables = iterate_shard(self.queries_url, self.queries.shards[shard], [self.id_column])
        chunks = [chunk for table in tables for chunk in table.column(self.id_column).chunks]
        return pa.chunked_array(chunks, pa.int64()).combine_chunks()

    def _aligned(self, shard: int) -> Iterator[pa.Table]:
        wanted = [self.id_column, "label_ids", "filter_label_ids"]
        columns = [column.name for column in self.queries.columns if column.name in wanted]
        entry = self.embeddings.shards[shard]
        points = iterate_shard(self.queries_url, self.queries.shards[shard], columns)
        for point, embedding in zip(points, iterate_shard(self.embeddings_url, entry), strict=True):
            if not point.column(self.id_column).equals(embedding.column("query_id")):
                raise TableError(
                    f"{join(self.embeddings_url, entry.path)}: its query_id column is not that of "
                    f"{join(self.queries_url, self.queries.shards[shard].path)}. Dump the embeddings again."
                )
            yield point.append_column("vector", embedding.column("vector"))


@dataclass(frozen=True)
class Dump:
    """The finished dump of one epoch, every lineage checked."""

    epoch: int
    vectors_url: str
    vectors: Manifest
    sources: tuple[Source, ...]

    @property
    def labels(self) -> int:
        return self.vectors.rows

    @property
    def dimension(self) -> int:
        return _dimension(self.vectors)

    @property
    def use_from(self) -> int:
        """The first epoch that may train on the table."""
        return int(self.vectors.parameters.get("use_from", self.epoch + 2))

    def parents(self, source: Source) -> dict[str, str]:
        """What the table of `source` is made from, by digest."""
        return {
            "queries": source.queries.digest,
            "embeddings": source.embeddings.digest,
            "vectors": self.vectors.digest,
        }


def complete_dumps(run: str) -> dict[int, str]:
    """Epoch to digest of the vectors, for every complete dump of `run`, oldest first.

    A dump is complete when its vectors, which are written last, and every source that they name are published.
    """
    layout = RunLayout(run)
    numbers = (parse_number(name) for name in storage.list_names(layout.dumps))
    found: dict[int, str] = {}
    for epoch in sorted(number for number in numbers if number is not None):
        vectors = _open_if_published(layout.vectors(epoch))
        if vectors and all(is_published(layout.embeddings(epoch, name)) for name in _source_names(vectors)):
            found[epoch] = vectors.digest
    return found


def newest(run: str) -> int:
    """The epoch of the newest complete dump. Raises InputError where there is none."""
    epochs = complete_dumps(run)
    if not epochs:
        raise InputError(
            f"{RunLayout(run).dumps}: no complete dump to mine. The trainer writes the first at the end of the epoch "
            "two before its hard negatives start; is the path of the run right?"
        )
    return max(epochs)


def open_dump(data: str, run: str, epoch: int) -> Dump:
    """The dump of `epoch`, made by training on `data`.

    Raises TableError: unfinished, damaged, made from other data, not aligned with its queries, or without some labels.
    """
    layout = RunLayout(run)
    url = layout.vectors(epoch)
    vectors = open_manifest(url, "vectors")
    if vectors.id_range != (0, vectors.rows) or not vectors.rows:
        raise TableError(f"{url}: expected the vectors of all labels [0, {vectors.rows}), got {vectors.id_range}.")
    sources = tuple(_open_source(data, layout, epoch, name) for name in _source_names(vectors))
    for source in sources:
        got, expected = _dimension(source.embeddings), _dimension(vectors)
        if got != expected:
            raise TableError(
                f"{source.embeddings_url}: embeddings of {got} dimensions, the vectors at {url} have {expected}. "
                "They come from two trainings: dump both again."
            )
    return Dump(epoch, url, vectors, sources)


def _open_source(data: str, layout: RunLayout, epoch: int, name: str) -> Source:
    places = {"queries": DataLayout(data).queries("train"), "labels": DataLayout(data).labels}
    if name not in places:
        raise TableError(f"{layout.dump(epoch)}: unknown source {name!r}; expected one of {sorted(places)}.")
    queries_url, url = places[name], layout.embeddings(epoch, name)
    queries, embeddings = open_manifest(queries_url, name), open_manifest(url, "embeddings")
    require_parent(url, embeddings, "queries", queries.digest, queries_url)
    shape, expected = (
        ([shard.rows for shard in table.shards], table.row_group_rows) for table in (embeddings, queries)
    )
    if shape != expected:
        raise TableError(
            f"{url}: not aligned with {queries_url}: its shards hold {shape[0]} rows in row groups of {shape[1]}, "
            f"expected {expected[0]} in row groups of {expected[1]}. Dump the embeddings again."
        )
    return Source(name, queries_url, queries, url, embeddings)


def _open_if_published(url: str) -> Manifest | None:
    """The trainer may take a dump back between two looks: it resumed from an earlier checkpoint."""
    try:
        return open_manifest(url, "vectors") if is_published(url) else None
    except TableError:
        if is_published(url):
            raise
        return None


def _source_names(vectors: Manifest) -> list[str]:
    return list(vectors.parameters.get("sources", ["queries"]))


def _dimension(table: Manifest) -> int:
    """D, from the type of the `vector` column: `fixed_size_list<element: float>[64]`."""
    types = {column.name: column.type for column in table.columns}
    return int(types["vector"].rsplit("[", 1)[-1].rstrip("]"))


def _at_least(rows: int, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    pending: list[pa.Table] = []
    for table in tables:
        pending.append(table)
        if sum(part.num_rows for part in pending) >= rows:
            yield pa.concat_tables(pending).combine_chunks()
            pending = []
    if pending:
        yield pa.concat_tables(pending).combine_chunks()
