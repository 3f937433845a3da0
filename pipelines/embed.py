"""`extremis embed`: queries or labels of DATA embedded with a checkpoint of RUN, aligned with their table.

    shards of the table ─▶ embed and write ─▶ sum up ─▶ publish

The only pipeline that loads a model: its workers need the trainer's packages. Memory is bounded by the encoder, one row
group and one batch, whatever the number of rows and labels.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import apache_beam as beam
import numpy as np
import pyarrow as pa

from pipelines.runners.runner import local_workers, make_pipeline
from pipelines.runners.runner import run as run_pipeline
from pipelines.sharding.summary import MergeSummaries, Summary, WriteSummary
from schemas import storage, tables
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout, staging
from schemas.manifest import Manifest, columns_of, is_published, open_manifest, publish
from schemas.shard_files.parquet import ShardFile, matrix_array, open_shard
from schemas.shard_files.shards import iterate_shard
from schemas.storage import join
from trainer.inputs import require_inputs
from trainer.model import Model, find_checkpoint, has_bias, load_encoder
from trainer.rows.threads import one_thread
from trainer.stream import Table, open_queries

TABLES = {"queries": "embeddings", "labels": "vectors"}

# One model a worker process, however many threads and shards it has.
_MODELS: dict[str, Model] = {}  # by the digest of the checkpoint
_LOADING = threading.Lock()


@dataclass(frozen=True)
class Plan:
    """Every choice of one run, made once in the launching process, so that all workers agree."""

    data: str
    run: str
    step: int
    checkpoint: str
    source: Table
    out: str
    dtype: str
    batch: int

    @property
    def what(self) -> str:
        return self.source.manifest.kind

    @property
    def kind(self) -> str:
        """Label embeddings are vectors to search, as classifier vectors are; those of queries are what searches."""
        return TABLES[self.what]

    @property
    def id_column(self) -> str:
        return "label_id" if self.what == "labels" else "query_id"

    def schema(self, dimension: int) -> pa.Schema:
        make = tables.vectors if self.what == "labels" else tables.embeddings
        return make(dimension, self.dtype)

    @property
    def summary(self) -> str:
        return join(staging(self.out), "summary.json")


def embed(
    data: str,
    run: str,
    out: str,
    *,
    what: str = "queries",
    split: str = "test",
    step: int | None = None,
    dtype: str = "float16",
    beam_options: Sequence[str] = (),
    batch: int = 1024,
) -> Manifest:
    """Embed the queries of `split`, or the label texts, with the newest checkpoint (or that of `step`): the manifest.

    Row j of row group g of shard i of OUT is x [D] of row j of row group g of shard i of the table: what the classifier
    vectors are multiplied with, so D counts the bias column where there is one. Queries give an `embeddings` table,
    labels a `vectors` table. `batch` rows are encoded at a time. A finished OUT of the same parents and parameters is
    returned as it is. Raises InputError (no such split, run or checkpoint; OUT holds something else; a value too large
    for `dtype`), TableError, StorageError.
    """
    source = _open_source(DataLayout(data), what, split)
    files = [join(source.url, shard.path) for shard in source.manifest.shards]
    pipeline = make_pipeline(local_workers(beam_options, [*files, out]))
    recipe, checkpoint = find_checkpoint(DataLayout(data), RunLayout(run), step)
    require_inputs(source.url, source.manifest, recipe.encoder.inputs)
    at = checkpoint.step
    parents = {what: source.manifest.digest, "checkpoint": checkpoint.manifest.digest}
    parameters = {"what": what, "step": at, "dtype": dtype, "batch": batch, "bias": has_bias(recipe)}
    if what == "queries":
        parameters["split"] = split
    plan = Plan(data, run, at, checkpoint.manifest.digest, source, out, dtype, batch)
    made = _existing(plan, parents, parameters)
    if made is not None:
        return made
    try:
        _wire(pipeline, plan)
        run_pipeline(pipeline)
        summary = Summary.from_json(storage.read_bytes(plan.summary))
    finally:
        storage.remove(staging(out), recursive=True)
    return _publish(plan, summary, parents, parameters)


class EmbedShard(beam.DoFn):
    """Shard number -> Summary: the shard's embeddings are written."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def process(self, shard: int) -> Iterator[Summary]:
        plan, source = self._plan, self._plan.source.manifest
        model = shared_model(plan)
        schema = plan.schema(model.width)
        file = ShardFile(plan.out, shard, len(source.shards), schema, source.row_group_rows or 1)
        # Bytes do not depend on a machine's cores; workers share them as processes.
        with one_thread(), file as out:
            for rows in embed_shard(plan, model, shard):
                out.write(rows)
        yield Summary({plan.kind: (out.entry,)}, {plan.kind: Counter(rows=out.entry.rows)})


def shared_model(plan: Plan) -> Model:
    """The encoder of the plan's checkpoint, loaded once a process; that of an earlier plan is let go."""
    with _LOADING:
        if plan.checkpoint not in _MODELS:
            _MODELS.clear()
            _MODELS[plan.checkpoint] = load_encoder(DataLayout(plan.data), RunLayout(plan.run), plan.step)
        return _MODELS[plan.checkpoint]


def embed_shard(plan: Plan, model: Model, shard: int) -> Iterator[pa.Table]:
    """The embeddings of shard `shard`, a row group at a time. Raises InputError, TableError."""
    schema = plan.schema(model.width)
    for group in iterate_shard(plan.source.url, plan.source.manifest.shards[shard], [plan.id_column, *model.columns]):
        ids = group.column(plan.id_column).combine_chunks()
        x = _narrow(model.embed_table(group, plan.batch, plan.what == "labels").numpy(), plan)
        vectors = matrix_array(x, schema.field("vector").type.value_type)
        yield pa.Table.from_arrays([ids, vectors], schema=schema)


def _narrow(x: np.ndarray, plan: Plan) -> np.ndarray:
    """x [B, D] as `dtype`. Raises InputError where a value does not fit."""
    with np.errstate(over="ignore"):
        narrow = x.astype(plan.dtype)
    if not np.isfinite(narrow).all():
        raise InputError(
            f"{plan.run}, step {plan.step}: an embedding of {plan.source.url} has a value of {np.abs(x).max():g}, "
            f"which {plan.dtype} does not hold. Embed with --dtype float32, or with another checkpoint."
        )
    return narrow


def _wire(pipeline: beam.Pipeline, plan: Plan) -> None:
    (
        pipeline
        | "Shards" >> beam.Create(range(len(plan.source.manifest.shards)))
        | "Embed shards" >> beam.ParDo(EmbedShard(plan))
        | "Merge summaries" >> beam.CombineGlobally(MergeSummaries())
        | "Write summary" >> beam.ParDo(WriteSummary(plan.summary))
    )


def _open_source(data: DataLayout, what: str, split: str) -> Table:
    if what == "labels":
        return Table.open(data.labels, "labels")
    if what != "queries":
        raise InputError(f"embed {what!r}: expected 'queries' or 'labels'.")
    return open_queries(data, split)


def _existing(plan: Plan, parents: dict[str, str], parameters: dict[str, object]) -> Manifest | None:
    """The table at `out` if it is this very one; None where there is none. Raises InputError for any other."""
    out = plan.out
    if not is_published(out):
        return None
    found = open_manifest(out)
    if (found.kind, found.parents, found.parameters) == (plan.kind, parents, parameters):
        return found
    raise InputError(
        f"{out}: holds a finished {found.kind} table made from something else, or with other options. "
        "Give another OUT, or remove it first."
    )


def _publish(plan: Plan, summary: Summary, parents: dict[str, str], parameters: dict[str, object]) -> Manifest:
    shards = summary.shards_of(plan.kind)
    with open_shard(plan.out, shards[0]) as first:
        columns = columns_of(first.schema_arrow)
    manifest = Manifest(
        kind=plan.kind,
        columns=columns,
        shards=shards,
        rows=sum(shard.rows for shard in shards),
        row_group_rows=plan.source.manifest.row_group_rows,
        id_range=plan.source.manifest.id_range,
        parents=parents,
        parameters=parameters,
        counters=dict(summary.counters[plan.kind]),
    )
    return publish(plan.out, manifest)
