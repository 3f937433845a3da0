"""Dump of an epoch for the miner: its query embeddings, aligned with the queries, and the classifier's vectors.

Each rank keeps and writes the embeddings of some shards, and the vectors of its labels; rank 0 publishes.
"""

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from schemas import storage, tables
from schemas.layout import RunLayout, parse_number
from schemas.manifest import Manifest, Shard, columns_of, is_published, publish, unpublish
from schemas.shard_files.parquet import encode, matrix_array, matrix_column, write_shard
from schemas.shard_files.ranges import naming_damage
from schemas.storage import join
from trainer.group import ALONE, Group, label_range
from trainer.stream import Source

VECTOR_ROWS = 1 << 20  # rows of a shard of vectors
VECTOR_GROUP_ROWS = 1 << 14


@dataclass(frozen=True)
class _Place:
    """A shard of embeddings to be: `index` of `source`'s, with the row ids [start, stop) over all sources."""

    source: int
    index: int
    start: int
    stop: int


class EmbeddingCollector:
    """Keeps the embeddings of one epoch's training rows, by row id, in a scratch file: [N, D] float16.

    Of several ranks each keeps those of its shards alone, N/G rows about. Each checkpoint saves the rows collected
    since the one before as a part, so a resume, on any number of ranks, loses none of them.
    """

    def __init__(
        self, run: RunLayout, epoch: int, sources: Sequence[Source], dimension: int, group: Group = ALONE
    ) -> None:
        self.epoch = epoch
        self._run, self._sources, self._group, self._dimension = run, sources, group, dimension
        self._places = [place for rank, place in _dealt(sources, group.ranks) if rank == group.rank]
        # The rows [first, last) are this rank's.
        self._first = self._places[0].start if self._places else 0
        self._last = self._places[-1].stop if self._places else 0
        self._scratch = tempfile.TemporaryFile(prefix="extremis-dump-")  # noqa: SIM115
        shape = (max(1, self._last - self._first), dimension)
        self._vectors = np.memmap(self._scratch, np.float16, "w+", shape=shape)
        self._fresh: list[np.ndarray] = []

    def add(self, rows: np.ndarray, x: torch.Tensor) -> None:
        """Keep what is this rank's of x [B, D] of global row ids `rows` [B]."""
        kept = self._take(rows, x.cpu().numpy())
        self._fresh.append(kept)

    def save_part(self, step: int) -> None:
        """Publish what came since the last part. `step` is the epoch's step that the checkpoint resumes at."""
        rows = np.concatenate([np.empty(0, np.int64), *self._fresh])
        if not len(rows):
            return
        vectors = matrix_array(self._vectors[rows - self._first], pa.float16())
        part = pa.Table.from_arrays([pa.array(rows), vectors], schema=tables.embeddings(self._dimension))
        name = f"step-{step:08d}.rank-{self._group.rank:05d}.parquet"
        storage.write_bytes(join(self._run.parts(self.epoch), name), memoryview(encode(part, len(rows))))
        self._fresh = []

    def restore(self, step: int) -> None:
        """Read the parts saved up to the epoch's `step`. Raises TableError when one does not decode."""
        for name in storage.list_names(self._run.parts(self.epoch)):
            number = parse_number(name.partition(".")[0])
            if number is None or number > step:
                continue
            place = join(self._run.parts(self.epoch), name)
            content = pa.BufferReader(storage.read_bytes(place))
            with naming_damage(place, "Remove the run's last checkpoint and resume."):
                part = pq.read_table(content, page_checksum_verification=True)
            self._take(part.column("query_id").to_numpy(), matrix_column(part, "vector"))

    def publish_for_clusters(self, parameters: dict) -> None:
        """Write the embeddings alone, aligned with each source: clusters are made of nothing else."""
        for number in range(len(self._sources)):
            self._publish_source(number, {**parameters, "epoch": self.epoch})
        self._remove_parts()

    def publish(self, vectors: torch.Tensor, labels: int, parameters: dict) -> None:
        """Write each source's embeddings, aligned with it, and last the vectors [n, D] of this rank's of `labels`."""
        for number in range(len(self._sources)):
            self._publish_source(number, {"epoch": self.epoch})
        _publish_vectors(
            self._run.vectors(self.epoch),
            vectors,
            {**parameters, "epoch": self.epoch, "sources": [source.name for source in self._sources]},
            labels,
            self._group,
        )
        self._remove_parts()

    def close(self) -> None:
        self._scratch.close()

    def _take(self, rows: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Keep what is this rank's; return its row ids."""
        inside = (rows >= self._first) & (rows < self._last)
        kept: np.ndarray = rows[inside]
        self._vectors[kept - self._first] = x[inside]
        return kept

    def _remove_parts(self) -> None:
        if self._group.first:
            storage.remove(self._run.parts(self.epoch), recursive=True)

    def _publish_source(self, number: int, parameters: dict) -> None:
        source = self._sources[number]
        url = self._run.embeddings(self.epoch, source.name)
        queries = source.table.manifest
        base = sum(other.rows for other in self._sources[:number])
        group_rows = queries.row_group_rows or 1
        schema = tables.embeddings(self._dimension)
        _begin(url, self._group)
        shards: list[Shard] = []
        for place in self._places:
            if place.source == number:
                ids = pa.array(np.arange(place.start - base, place.stop - base))
                rows = self._vectors[place.start - self._first : place.stop - self._first]
                table = pa.Table.from_arrays([ids, matrix_array(rows, pa.float16())], schema=schema)
                shards.append(write_shard(url, place.index, len(queries.shards), table, group_rows))
        _end(
            url,
            self._group,
            shards,
            Manifest(
                kind="embeddings",
                columns=columns_of(schema),
                rows=queries.rows,
                row_group_rows=group_rows,
                id_range=(0, queries.rows),
                parents={"queries": queries.digest},
                parameters=parameters,
            ),
        )


def _publish_vectors(url: str, vectors: torch.Tensor, parameters: dict, labels: int, group: Group) -> None:
    """Publish classifier vectors [L, D] as a table of contiguous row blocks, cut where a rank's labels end.

    `vectors` [n, D] are those of this rank's of `labels`. Raises StorageError.
    """
    ranges = [label_range(labels, rank, group.ranks) for rank in range(group.ranks)]
    blocks = [
        (rank, low, min(low + VECTOR_ROWS, stop))
        for rank, (start, stop) in enumerate(ranges)
        for low in range(start, stop, VECTOR_ROWS)
    ]
    first = ranges[group.rank][0]
    narrow = vectors.dtype != torch.float32
    schema = tables.vectors(vectors.shape[1], "float16" if narrow else "float32")
    kind = pa.float16() if narrow else pa.float32()
    _begin(url, group)
    shards = []
    for index, (rank, start, stop) in enumerate(blocks):
        if rank == group.rank:
            rows = vectors[start - first : stop - first]
            block = matrix_array((rows.half() if narrow else rows).cpu().numpy(), kind)
            table = pa.Table.from_arrays([pa.array(np.arange(start, stop)), block], schema=schema)
            shards.append(write_shard(url, index, len(blocks), table, VECTOR_GROUP_ROWS))
    _end(
        url,
        group,
        shards,
        Manifest(
            kind="vectors",
            columns=columns_of(schema),
            rows=labels,
            row_group_rows=VECTOR_GROUP_ROWS,
            id_range=(0, labels),
            parameters=parameters,
        ),
    )


def dump_is_published(run: RunLayout, epoch: int, for_clusters: str | None = None) -> bool:
    """Tell whether the dump of `epoch` is whole: its vectors are published last.

    A dump `for_clusters` of the source of this name has embeddings alone.
    """
    return is_published(run.vectors(epoch) if for_clusters is None else run.embeddings(epoch, for_clusters))


def _dealt(sources: Sequence[Source], ranks: int) -> list[tuple[int, _Place]]:
    """Deal the shards of all sources to ranks, in order: each rank has contiguous ones, of about as many rows."""
    total = max(1, sum(source.rows for source in sources))
    places, start = [], 0
    for number, source in enumerate(sources):
        for index, shard in enumerate(source.table.manifest.shards):
            stop = start + shard.rows
            rank = min(ranks - 1, (start + stop) * ranks // (2 * total))
            places.append((rank, _Place(number, index, start, stop)))
            start = stop
    return places


def _begin(url: str, group: Group) -> None:
    """Unpublish the table at `url`, before any rank overwrites a shard of it."""
    if group.first:
        unpublish(url)
    group.barrier()


def _end(url: str, group: Group, shards: list[Shard], manifest: Manifest) -> None:
    """Publish the table at `url` once every rank has written its `shards`, which are in rank order."""
    gathered = itertools.chain.from_iterable(group.gather_objects(shards))
    if group.first:
        publish(url, manifest.model_copy(update={"shards": tuple(gathered)}))
