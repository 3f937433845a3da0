"""Hard negatives that are refreshed beside the training (ASTRA, section 3.2).

To use a table in epoch e, the query embeddings of epoch e - 2 are kept (the training computes them anyway) and dumped
with the classifier vectors at its end; the miner works during e - 1; e starts with one decision about what it found.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from schemas import storage, tables
from schemas.errors import InputError, TableError
from schemas.layout import RunLayout, parse_number
from schemas.manifest import Manifest, Shard, columns_of, is_published, open_manifest, publish, unpublish
from schemas.parquet import encode, matrix_array, matrix_column, write_shard
from schemas.ranges import naming_damage
from schemas.storage import join
from trainer.config import Recipe
from trainer.stream import Source

LEAD = 2  # epochs between a dump and the first use of its table
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


@dataclass(frozen=True)
class Adoption:
    """What an epoch trains on: the table made for `table_epoch` (None: random negatives only); late or not."""

    epoch: int
    table_epoch: int | None
    digests: dict[str, str]
    late: bool

    @property
    def age(self) -> int | None:
        """Epochs between the dump that the table was mined from and this epoch."""
        return None if self.table_epoch is None else self.epoch - self.table_epoch + LEAD


def adopt(
    run: RunLayout, recipe: Recipe, sources: list[Source], epoch: int, say: Callable[[str], None]
) -> tuple[Adoption, list[Source]]:
    """Decide once which table `epoch` trains on, record it, and join it to `sources`.

    The newest finished table made for an epoch up to this one wins. A decision recorded before (by the run that is
    being resumed) stands, whatever has appeared since. Raises TableError when a recorded table is gone or differs.
    """
    decision = _recorded(run, epoch)
    if decision is None:
        decision = _decide(run, recipe, sources, epoch, say)
        body = {"epoch": epoch, "table_epoch": decision.table_epoch, "digests": decision.digests, "late": decision.late}
        storage.write_bytes(run.adoption(epoch), json.dumps(body, sort_keys=True).encode())
    if decision.table_epoch is None:
        return decision, [source.with_negatives(None) for source in sources]
    joined = [source.with_negatives(run.negatives(decision.table_epoch, source.name)) for source in sources]
    for source in joined:
        assert source.negatives is not None
        if source.negatives.manifest.digest != decision.digests[source.name]:
            raise TableError(
                f"{source.negatives.url}: epoch {epoch} was trained on another version of this table "
                f"(digest {decision.digests[source.name][:12]}…, now {source.negatives.manifest.digest[:12]}…). "
                "A resumed run needs the table it started with; start a new run instead."
            )
    return decision, joined


def follow(
    run: RunLayout, recipe: Recipe, sources: list[Source], epoch: int, seconds: float = 600.0
) -> tuple[Adoption, list[Source]]:
    """What the rank that calls `adopt` decided for `epoch`, waited for up to `seconds`: for all the other ranks.

    Raises InputError when no decision is recorded in time, TableError as `adopt` does.
    """
    deadline = time.monotonic() + seconds
    while not storage.exists(run.adoption(epoch)):
        if time.monotonic() > deadline:
            raise InputError(
                f"{run.adoption(epoch)}: no decision about epoch {epoch} after {seconds:g} seconds. Does rank 0 run, "
                "and do all ranks have the same RUN?"
            )
        time.sleep(0.1)
    return adopt(run, recipe, sources, epoch, print)


def _recorded(run: RunLayout, epoch: int) -> Adoption | None:
    try:
        body = json.loads(storage.read_bytes(run.adoption(epoch)))
    except FileNotFoundError:
        return None
    return Adoption(body["epoch"], body["table_epoch"], body["digests"], body["late"])


def _decide(run: RunLayout, recipe: Recipe, sources: list[Source], epoch: int, say: Callable[[str], None]) -> Adoption:
    if not recipe.uses_table(epoch):
        return Adoption(epoch, None, {}, False)
    due = max(e for e in recipe.table_epochs() if e <= epoch)
    deadline = time.monotonic() + (recipe.refresh.wait_seconds if recipe.refresh.late == "wait" else 0)
    found = _newest(run, sources, epoch)
    while (found is None or found < due) and time.monotonic() < deadline:
        time.sleep(0.1)
        found = _newest(run, sources, epoch)
    late = found is None or found < due
    if late:
        instead = "random negatives only" if found is None else f"the table of epoch {found}"
        say(f"epoch {epoch}: the hard-negative table due at epoch {due} is not there yet; going on with {instead}")
    if found is None:
        return Adoption(epoch, None, {}, late)
    digests = {s.name: open_manifest(run.negatives(found, s.name), "negatives").digest for s in sources}
    return Adoption(epoch, found, digests, late)


def _newest(run: RunLayout, sources: list[Source], epoch: int) -> int | None:
    """The newest epoch up to `epoch` with a finished table for every source."""
    numbers = [parse_number(name) for name in storage.list_names(run.negatives_root)]
    for number in sorted((n for n in numbers if n is not None and n <= epoch), reverse=True):
        if all(is_published(run.negatives(number, source.name)) for source in sources):
            return number
    return None
