"""Dump of an epoch for the miner: query embeddings, in the order of the queries, and the classifier's vectors.

Each rank collects and writes the embeddings of some shards, and the vectors of its labels; rank 0 publishes the dump.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from schemas import arrow, storage
from schemas.layout import RunLayout, parse_number
from schemas.manifest import Manifest, Shard, columns_of, is_published, publish, unpublish
from schemas.mapped import ScratchFile
from schemas.owners import Claim, Unclaimed
from schemas.shard_files.parquet import encode, matrix_array, matrix_column, write_shard
from schemas.storage import join
from trainer.checkpoints import BackgroundWriter, ReadRows
from trainer.device import CPU, AsyncCopy
from trainer.group import ALONE, Group
from trainer.methods.recipe import Recipe
from trainer.methods.sections import LEAD
from trainer.model import Model
from trainer.stream import Source

VECTOR_ROWS = 1 << 20  # rows per shard of vectors
VECTOR_GROUP_ROWS = 1 << 14
ReadVectors = Callable[[int, int], torch.Tensor]  # rows [start, stop) of a rank's vectors
_MAX_IN_FLIGHT = 2  # steps whose embeddings are still being copied from a GPU


def dump_is_published(run: RunLayout, epoch: int, for_clusters: str | None = None) -> bool:
    """Return whether the dump of `epoch`, `for_clusters` of a source or with vectors, is complete."""
    return is_published(run.vectors(epoch) if for_clusters is None else run.embeddings(epoch, for_clusters))


@dataclass(frozen=True)
class DumpWriter:
    """Writes the dumps for the tables of later epochs, on all ranks."""

    run: RunLayout
    recipe: Recipe
    group: Group
    claim: Claim
    writer: BackgroundWriter

    def dump_first(self, sources: list[Source], model: Model) -> None:
        """Start to write the dump for the table of epoch 0, of an earlier model. Raises TableError, StorageError."""
        dump = self.dump(-LEAD, 0, sources, model.width)
        if dump is not None:
            dump.embed(model)
            self.publish(dump, model, 0)

    def dump(self, epoch: int, step: int, sources: list[Source], columns: int) -> EmbeddingCollector | None:
        """Open the dump of `epoch`, restored up to its `step`; None if no table needs the dump, or the dump exists."""
        if epoch + LEAD not in self.recipe.table_epochs():
            return None
        for_clusters = sources[0].name if self.recipe.is_clustered else None
        if self.group.decide(lambda: dump_is_published(self.run, epoch, for_clusters)):
            if self.group.first:  # a crash may have happened after a dump and before the removal of its parts
                self.claim.require()
                storage.remove(self.run.parts(epoch), recursive=True)
            return None
        collector = EmbeddingCollector(self.run, epoch, sources, columns, self.writer.group, self.claim)
        if step:
            collector.restore(step)
        return collector

    def save_part(self, dump: EmbeddingCollector, step: int, global_step: int) -> None:
        """Start to write the dump up to the epoch's `step`. Raises StorageError from earlier background writing."""
        rows = dump.take_fresh()
        self.writer.begin(global_step, {}, lambda _: dump.save_part(step, rows))

    def publish(self, dump: EmbeddingCollector, model: Model, step: int) -> None:
        """Start to write a dump with the current vectors, at global `step`. Raises StorageError as `save_part` does."""
        head = model.head
        dump.fetch()
        facts: dict[str, Any] = {"step": step, "use_from": dump.epoch + LEAD, "bias": head.bias}
        facts |= self.recipe.table_parameters
        rows, vectors = ({}, None) if self.recipe.is_clustered else (head.rows(), head.vectors)

        def write(read: ReadRows) -> None:
            vectors_then = (lambda low, high: read(low, high, "weight")["weight"]) if rows else None
            dump.publish(vectors, head.labels, facts, vectors_then)

        self.writer.begin(step, rows, write)


@dataclass(frozen=True)
class _EmbeddingShard:
    """A shard of embeddings to write: shard `index` of `source`, with the row ids [start, stop) over all sources."""

    source: int
    index: int
    start: int
    stop: int


class EmbeddingCollector:
    """Collects the embeddings of one epoch's training rows, by row id, in a scratch file: [N, D] float16.

    A rank keeps only the rows of its shards, about N/G. Each checkpoint saves the rows since the previous one as a
    part, so a run that resumes, on any number of ranks, loses none.
    """

    def __init__(
        self,
        run: RunLayout,
        epoch: int,
        sources: Sequence[Source],
        dimension: int,
        group: Group = ALONE,
        claim: Claim | None = None,
    ) -> None:
        self.epoch, self._claim = epoch, claim or Unclaimed()
        self._run, self._sources, self._group, self._dimension = run, sources, group, dimension
        self._places = _deal_shards(sources, group)
        # This rank keeps the rows [first, last).
        self._first = self._places[0].start if self._places else 0
        self._last = self._places[-1].stop if self._places else 0
        shape = (max(1, self._last - self._first), dimension)
        scratch = ScratchFile("the embeddings of a dump").reserve(2 * shape[0] * dimension)
        self._vectors = np.ndarray(shape, np.float16, scratch)
        self._fresh: list[np.ndarray] = []
        self._arriving: deque[tuple[np.ndarray, AsyncCopy]] = deque()

    def add(self, rows: np.ndarray, x: torch.Tensor) -> None:
        """Store this rank's part of x [B, D], the embeddings of the rows with the global ids `rows` [B]."""
        self._arriving.append((rows, AsyncCopy(x)))
        # On a GPU the last steps are still running: their embeddings are fetched after later steps have begun.
        self.fetch(0 if x.device == CPU else _MAX_IN_FLIGHT)

    def fetch(self, left: int = 0) -> None:
        """Store the embeddings of all steps except the last `left` steps."""
        while len(self._arriving) > left:
            rows, x = self._arriving.popleft()
            self._fresh.append(self._take(rows, x.take()))

    def embed(self, model: Model) -> None:
        """Compute and store the embeddings of all rows of this rank with `model`. Raises TableError."""
        for place in self._places:
            table, first = self._sources[place.source].table, place.start
            for rows in table.batches_of(place.index, model.columns):
                x = model.embed_table(rows).to(CPU, torch.float16).numpy()
                self._vectors[first - self._first :][: len(x)] = x
                first += len(x)

    def take_fresh(self) -> np.ndarray:
        """Return the row ids [n] collected since the previous call, for `save_part`."""
        self.fetch()
        rows, self._fresh = np.concatenate([np.empty(0, np.int64), *self._fresh]), []
        return rows

    def save_part(self, step: int, rows: np.ndarray) -> None:
        """Publish `rows` [n] as a part, for a checkpoint that resumes at the epoch's `step`.

        The part may contain a newer embedding of a row; a resumed run repeats the steps, and gets the same embedding.
        """
        if not len(rows):
            return
        vectors = matrix_array(self._vectors[rows - self._first], pa.float16())
        part = pa.Table.from_arrays([pa.array(rows), vectors], schema=arrow.embeddings(self._dimension))
        name = f"step-{step:08d}.rank-{self._group.rank:05d}.parquet"
        content = encode(part, len(rows)).to_pybytes()
        storage.write_sealed(join(self._run.parts(self.epoch), name), content, durable=True)

    def restore(self, step: int) -> None:
        """Read the parts saved up to the epoch's `step`. Raises TableError if a part cannot be decoded."""
        for name in storage.list_names(self._run.parts(self.epoch)):
            number = parse_number(name.partition(".")[0])
            if number is None or number > step:
                continue
            place = join(self._run.parts(self.epoch), name)
            content = storage.read_sealed(place, "Remove the last checkpoint of the run, and resume.")
            part = pq.read_table(pa.BufferReader(content))
            self._take(part.column("query_id").to_numpy(), matrix_column(part, "vector"))

    def publish(
        self, vectors: torch.Tensor | None, labels: int, parameters: dict, read: ReadVectors | None = None
    ) -> None:
        """Write each source's embeddings in row order, then this rank's vectors [n, D] of `labels` labels. Raises
        StorageError.

        `read` returns rows of `vectors` as they were when writing began. Without vectors, as for clusters, the manifest
        of the embeddings has the `parameters`.
        """
        parameters = {**parameters, "epoch": self.epoch}
        for number in range(len(self._sources)):
            self._publish_source(number, {"epoch": self.epoch} if vectors is not None else parameters)
        if vectors is not None:
            parameters["sources"] = [source.name for source in self._sources]
            self._publish_vectors(vectors, read or (lambda low, high: vectors[low:high]), labels, parameters)
        if self._group.first:
            storage.remove(self._run.parts(self.epoch), recursive=True)

    def _take(self, rows: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Store the embeddings of this rank's rows; return their ids."""
        inside = (rows >= self._first) & (rows < self._last)
        kept: np.ndarray = rows[inside]
        self._vectors[kept - self._first] = x[inside]
        return kept

    def _publish_source(self, number: int, parameters: dict) -> None:
        source = self._sources[number]
        queries = source.table.manifest
        base = sum(other.rows for other in self._sources[:number])
        first = queries.id_range[0] - base if queries.id_range else -base  # a part's rows keep their ids
        blocks = (
            (place.index, place.start + first, self._vectors[place.start - self._first : place.stop - self._first])
            for place in self._places
            if place.source == number
        )
        manifest = Manifest(
            kind="embeddings",
            rows=queries.rows,
            row_group_rows=queries.row_group_rows or 1,
            id_range=queries.id_range,
            parents={"queries": queries.digest},
            parameters=parameters,
        )
        url, schema = self._run.embeddings(self.epoch, source.name), arrow.embeddings(self._dimension)
        self._publish_table(url, schema, blocks, len(queries.shards), manifest, queries.group_rows)

    def _publish_vectors(self, vectors: torch.Tensor, read: ReadVectors, labels: int, parameters: dict) -> None:
        """Publish vectors [L, D] as a table of contiguous row blocks; each block contains labels of a single rank."""
        group = self._group
        edges = [0, *itertools.accumulate(group.sizes(len(vectors)))]
        places = [
            (rank, low, min(low + VECTOR_ROWS, stop))
            for rank, (start, stop) in enumerate(itertools.pairwise(edges))
            for low in range(start, stop, VECTOR_ROWS)
        ]
        first = edges[group.rank]
        narrow = vectors.dtype != torch.float32
        dtype = torch.float16 if narrow else torch.float32
        blocks = (
            (index, start, read(start - first, stop - first).to("cpu", dtype).numpy())
            for index, (rank, start, stop) in enumerate(places)
            if rank == group.rank
        )
        manifest = Manifest(kind="vectors", rows=labels, row_group_rows=VECTOR_GROUP_ROWS, parameters=parameters)
        schema = arrow.vectors(vectors.shape[1], "float16" if narrow else "float32")
        url = self._run.vectors(self.epoch)
        self._publish_table(url, schema, blocks, len(places), manifest, lambda _: VECTOR_GROUP_ROWS)

    def _publish_table(
        self,
        url: str,
        schema: pa.Schema,
        blocks: Iterable[tuple[int, int, np.ndarray]],
        count: int,
        manifest: Manifest,
        group_rows: Callable[[int], int | tuple[int, ...]],
    ) -> None:
        """Publish a table of vectors by id, after all ranks have written their shards, which are in rank order.

        `blocks`: this rank's shards as (index among `count` shards, first id, vectors [n, D]). `manifest`: all fields
        except columns, shards and range of ids. `group_rows`: the sizes of the row groups of each shard. No rank
        overwrites a shard of a table that is still published.
        """
        group = self._group
        if group.first:
            self._claim.require()
            unpublish(url)
        group.barrier()
        shards: list[Shard] = []
        for index, first, vectors in blocks:
            ids = pa.array(np.arange(first, first + len(vectors)))
            columns = [ids, matrix_array(vectors, schema.field("vector").type.value_type)]
            table = pa.Table.from_arrays(columns, schema=schema)
            shards.append(write_shard(url, index, count, table, group_rows(index)))
        gathered = itertools.chain.from_iterable(group.all_gather_objects(shards))
        if group.first:
            self._claim.require()
            ids = manifest.id_range or (0, manifest.rows)
            facts = {"columns": columns_of(schema), "shards": tuple(gathered), "id_range": ids}
            publish(url, manifest.model_copy(update=facts))


def _deal_shards(sources: Sequence[Source], group: Group) -> list[_EmbeddingShard]:
    """Return this rank's shards: contiguous shards of all sources, in order, with about N/G rows."""
    total = max(1, sum(source.rows for source in sources))
    places, start = [], 0
    for number, source in enumerate(sources):
        for index, shard in enumerate(source.table.manifest.shards):
            stop = start + shard.rows
            if min(group.ranks - 1, (start + stop) * group.ranks // (2 * total)) == group.rank:
                places.append(_EmbeddingShard(number, index, start, stop))
            start = stop
    return places
