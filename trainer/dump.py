"""What an epoch leaves for the miner: its query embeddings, aligned with the queries, and the classifier's vectors."""

import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from schemas import storage, tables
from schemas.layout import RunLayout, parse_number
from schemas.manifest import Manifest, Shard, columns_of, is_published, publish, unpublish
from schemas.parquet import encode, matrix_array, matrix_column, write_shard
from schemas.ranges import naming_damage
from schemas.storage import join
from trainer.stream import Source

VECTOR_ROWS = 1 << 20  # rows of a shard of vectors
VECTOR_GROUP_ROWS = 1 << 14


class EmbeddingCollector:
    """Keeps the embeddings of one epoch's training rows, by row id, in a scratch file: [N, D] float16.

    Each checkpoint saves the rows collected since the one before as a part, so a resume loses none of them.
    """

    def __init__(self, run: RunLayout, epoch: int, rows: int, dimension: int) -> None:
        self.epoch = epoch
        self._run = run
        self._scratch = tempfile.TemporaryFile(prefix="extremis-dump-")  # noqa: SIM115
        self._vectors = np.memmap(self._scratch, np.float16, "w+", shape=(rows, dimension))
        self._fresh: list[np.ndarray] = []

    def add(self, rows: np.ndarray, x: torch.Tensor) -> None:
        """Keep x [B, D] of global row ids `rows` [B]."""
        self._vectors[rows] = x.numpy()
        self._fresh.append(rows)

    def save_part(self, step: int) -> None:
        """Publish what came since the last part. `step` is the epoch's step that the checkpoint resumes at."""
        if not self._fresh:
            return
        rows = np.concatenate(self._fresh)
        schema = tables.embeddings(self._vectors.shape[1])
        vectors = matrix_array(self._vectors[rows], pa.float16())
        part = pa.Table.from_arrays([pa.array(rows), vectors], schema=schema)
        storage.write_bytes(self._part(step), memoryview(encode(part, len(rows))))
        self._fresh = []

    def restore(self, step: int) -> None:
        """Take the parts saved up to the epoch's `step`. Raises TableError when one does not decode."""
        for name in storage.list_names(self._run.parts(self.epoch)):
            number = parse_number(name.removesuffix(".parquet"))
            if number is None or number > step:
                continue
            place = self._part(number)
            content = pa.BufferReader(storage.read_bytes(place))
            with naming_damage(place, "Remove the run's last checkpoint and resume."):
                part = pq.read_table(content, page_checksum_verification=True)
            self._vectors[part.column("query_id").to_numpy()] = matrix_column(part, "vector")

    def publish(self, sources: list[Source], vectors: torch.Tensor, parameters: dict) -> None:
        """Write each source's embeddings, aligned with it, and the classifier `vectors` [L, D] last."""
        first = 0
        for source in sources:
            self._publish_source(source, first)
            first += source.rows
        publish_vectors(
            self._run.vectors(self.epoch),
            vectors,
            {**parameters, "epoch": self.epoch, "sources": [source.name for source in sources]},
        )
        storage.remove(self._run.parts(self.epoch), recursive=True)

    def close(self) -> None:
        self._scratch.close()

    def _part(self, step: int) -> str:
        return join(self._run.parts(self.epoch), f"step-{step:08d}.parquet")

    def _publish_source(self, source: Source, first: int) -> Manifest:
        url = self._run.embeddings(self.epoch, source.name)
        queries = source.table.manifest
        group = queries.row_group_rows or 1
        schema = tables.embeddings(self._vectors.shape[1])
        unpublish(url)
        shards: list[Shard] = []
        start = 0
        for index, shard in enumerate(queries.shards):
            rows = slice(first + start, first + start + shard.rows)
            ids = pa.array(np.arange(start, start + shard.rows))
            table = pa.Table.from_arrays([ids, matrix_array(self._vectors[rows], pa.float16())], schema=schema)
            shards.append(write_shard(url, index, len(queries.shards), table, group))
            start += shard.rows
        manifest = Manifest(
            kind="embeddings",
            columns=columns_of(schema),
            shards=tuple(shards),
            rows=queries.rows,
            row_group_rows=group,
            id_range=(0, queries.rows),
            parents={"queries": queries.digest},
            parameters={"epoch": self.epoch},
        )
        return publish(url, manifest)


def publish_vectors(url: str, vectors: torch.Tensor, parameters: dict) -> Manifest:
    """Publish classifier vectors [L, D] as a table of contiguous row blocks. Raises StorageError."""
    unpublish(url)
    schema = tables.vectors(vectors.shape[1])
    labels = len(vectors)
    count = max(1, -(-labels // VECTOR_ROWS))
    shards = []
    for index in range(count):
        rows = slice(index * VECTOR_ROWS, min((index + 1) * VECTOR_ROWS, labels))
        block = matrix_array(vectors[rows].numpy(), pa.float32())
        table = pa.Table.from_arrays([pa.array(np.arange(rows.start, rows.stop)), block], schema=schema)
        shards.append(write_shard(url, index, count, table, VECTOR_GROUP_ROWS))
    manifest = Manifest(
        kind="vectors",
        columns=columns_of(schema),
        shards=tuple(shards),
        rows=labels,
        row_group_rows=VECTOR_GROUP_ROWS,
        id_range=(0, labels),
        parameters=parameters,
    )
    return publish(url, manifest)


def dump_is_published(run: RunLayout, epoch: int) -> bool:
    """Whether the dump of `epoch` is whole: its vectors are published last."""
    return is_published(run.vectors(epoch))
