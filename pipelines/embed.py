"""`extremis embed DATA RUN OUT`: queries or labels of DATA embedded with a checkpoint of RUN, aligned with their table.

    shards of the table ─▶ embed and write ─▶ sum up ─▶ publish

It loads a model, as `pipelines.encode` does: workers need the trainer's packages. Memory is bounded by the encoder, one
row group and one batch, whatever the number of rows and labels.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pipelines.common.flow import Flow
from pipelines.common.progress import Meter, Progress, Watch, silent
from pipelines.common.summary import Summary, describe, read_summary, write_sum, written_schema
from pipelines.options import EmbedOptions
from pipelines.runners.runner import choose_runner, for_workers
from schemas import arrow
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout, staging
from schemas.manifest import Manifest, shard_url
from schemas.owners.build import building, clean_up
from schemas.owners.place import require_place
from schemas.reuse import Request, find_reusable
from schemas.shard_files.parquet import matrix_array, writing_shard
from schemas.sizes import require_room
from schemas.storage import join
from schemas.table import Table
from trainer.device import open_device
from trainer.inputs import require_inputs
from trainer.model import Model, find_checkpoint, has_bias, load_encoder
from trainer.rows.threads import one_thread
from trainer.stream import open_queries

# One model a worker process, however many threads and shards it has.
_MODELS: dict[str, Model] = {}  # by the digest of the checkpoint
_LOADING = threading.Lock()
_STEP = "embed"


@dataclass(frozen=True)
class EmbedPlan:
    """Plan of one run: every choice, made once in the launching process, so that all workers agree."""

    data: str
    run: str
    step: int
    checkpoint: str
    source: Table
    out: str
    options: EmbedOptions
    device: str = "auto"
    meter: Meter = field(default=Meter(), compare=False)

    @property
    def kind(self) -> str:
        """Kind of the table: label embeddings are vectors to search, as classifier vectors are."""
        return "vectors" if self.options.what == "labels" else "embeddings"

    def schema(self, dimension: int) -> pa.Schema:
        """Return the schema of the table with vectors [dimension]."""
        make = arrow.vectors if self.options.what == "labels" else arrow.embeddings
        return make(dimension, self.options.dtype)

    @property
    def summary(self) -> str:
        """URL of what the workers report."""
        return join(staging(self.out), "summary.json")


def embed(
    data: str,
    run: str,
    out: str,
    options: EmbedOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
    device: str = "auto",
) -> Manifest:
    """Embed the queries of a split, or the label texts, with a checkpoint of RUN: the manifest of the table at OUT.

    Row j of row group g of shard i of OUT is x [D] of row j of row group g of shard i of the table: what the classifier
    vectors are multiplied with, so D counts the bias column where there is one. Queries give an `embeddings` table,
    labels a `vectors` table. A finished OUT of the same parents and parameters is returned as it is. Each worker opens
    `device` where it is. Raises InputError
    (no such split, run or checkpoint; OUT holds something else; a value too large for the dtype), TableError,
    StorageError.
    """
    data, run, out = (for_workers(beam_options, url) for url in (data, run, out))
    options, layout = options or EmbedOptions(), DataLayout(data)
    require_place(out, "embedded", [data, run])
    if not beam_options:  # workers elsewhere may have what this machine has not
        open_device(device)
    labels = options.what == "labels"
    source = Table.open(layout.labels, "labels") if labels else open_queries(layout, options.split)
    files = [shard_url(source.url, shard) for shard in source.manifest.shards]
    choose_runner(beam_options)  # refuses wrong options before anything is read
    recipe, checkpoint = find_checkpoint(layout, RunLayout(run), options.step)
    require_inputs(source, recipe.encoder.inputs)
    parents = {options.what: source.manifest.digest, "checkpoint": checkpoint.table.digest}
    parameters = {**options.model_dump(), "step": checkpoint.step, "bias": has_bias(recipe)}
    if labels:
        del parameters["split"]
    request = Request("vectors" if labels else "embeddings", parents, parameters)
    remedy = "Give another OUT, or remove it first."
    finished = find_reusable(out, request, remedy)
    if finished is not None:
        clean_up(out, "embedded")
        return finished
    width, item = recipe.encoder.dimension + int(has_bias(recipe)), np.dtype(options.dtype).itemsize
    require_room(out, {"embeddings": source.manifest.rows * width * item}, "Give another OUT, or --dtype float16.")
    with choose_runner(beam_options, [*files, out]) as runner, building(out, "embedded", progress) as build:
        finished = find_reusable(out, request, remedy)  # the last owner may have made it
        if finished is not None:
            return finished
        watch = Watch(staging(build.url), progress or silent)
        watch.expect({_STEP: source.manifest.rows})
        digest = checkpoint.table.digest
        plan = EmbedPlan(data, run, checkpoint.step, digest, source, build.url, options, device, watch.meter)
        runner.check(files[:1], build.url, progress or silent)
        flow = Flow()
        shards = flow.create("Shards", range(len(source.manifest.shards)))
        write_sum(shards.map("Embed shards", embed_shard, plan), plan.summary)
        runner.run(flow, watch)
        made, of = read_summary(plan.summary), source.manifest
        schema = written_schema(plan.out, made, request.kind)
        manifest = build.publish(describe(request, made, schema, of.row_group_rows, of.id_range))
        watch.summarize()
        return manifest


def embed_shard(shard: int, plan: EmbedPlan) -> Summary:
    """Write the embeddings of shard `shard`. Raises InputError, TableError, StorageError."""
    source, labels = plan.source, plan.options.what == "labels"
    plan.meter.start(_STEP)
    model = shared_model(plan)
    schema = plan.schema(model.width)
    groups = source.batches_of(shard, [source.id_column, *model.columns])
    file = writing_shard(plan.out, shard, len(source.shards), schema, source.manifest.group_rows(shard))
    # Bytes do not depend on a machine's cores; workers share them as processes.
    with one_thread(), file as out:
        for group in groups:
            z = model.embed_table(group, plan.options.batch, labels).cpu().numpy()
            x = narrow(z, plan.options.dtype, f"{plan.run}, step {plan.step}: an embedding of {source.url}")
            vectors = matrix_array(x, schema.field("vector").type.value_type)
            out.write(pa.table([group.column(source.id_column), vectors], schema=schema))
            plan.meter.count(_STEP, group.num_rows)
    plan.meter.count(_STEP, 0, out.entry.bytes)
    return Summary({plan.kind: (out.entry,)}, {plan.kind: Counter(rows=out.entry.rows)})


def shared_model(plan: EmbedPlan) -> Model:
    """Load the encoder of the plan's checkpoint, once a process; that of an earlier plan is let go."""
    with _LOADING:
        if plan.checkpoint not in _MODELS:
            _MODELS.clear()
            device = open_device(plan.device)
            _MODELS[plan.checkpoint] = load_encoder(DataLayout(plan.data), RunLayout(plan.run), plan.step, device)
        return _MODELS[plan.checkpoint]


def narrow(x: np.ndarray, dtype: str, what: str) -> np.ndarray:
    """Return x [B, D] as `dtype`. Raises InputError about `what` where a value does not fit."""
    with np.errstate(over="ignore"):
        narrowed = x.astype(dtype)
    if not np.isfinite(narrowed).all():
        raise InputError(
            f"{what} has a value of {np.abs(x).max():g}, which {dtype} does not hold. "
            "Embed with --dtype float32, or with another checkpoint."
        )
    return narrowed
