"""`extremis embed`: embed texts with any model (MODEL INPUT OUT), or queries or labels with a run (DATA RUN OUT).

    files of texts ─▶ blocks of rows in staging                             (MODEL INPUT OUT only; then the plan)
    shards ─▶ embed and write ─▶ sum up ─▶ publish

With a run's checkpoint, each output shard corresponds to a shard of the table, and the vectors are aligned with the
rows. With any other model, each output shard corresponds to a block of rows, or to a shard of DATA. The shards depend
only on INPUT, so that a resumed run can reuse the shards that are already written. Workers load the model, so they need
the trainer's packages. Memory is bounded by the model, a row group or block of rows, and a batch for each thread,
regardless of the number of rows and labels.
"""

import functools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import numpy as np
import pyarrow as pa

from pipelines.flow import FileExchange, receive, to_record_batch
from pipelines.formats import base
from pipelines.formats.base import parse_fields
from pipelines.formats.keyed import Texts
from pipelines.job import REMEDY, Job, Summary, as_json, describe, make_table, written_schema
from pipelines.models import load_texts_model, narrow, once_a_process
from pipelines.options import EmbedOptions, EmbedTextsOptions
from pipelines.progress import Meter, Progress, silent
from pipelines.runners.local import choose_runner, for_workers
from pipelines.sharding.publish import Phases
from schemas import arrow, code_version, storage
from schemas.errors import InputError, TableError, option
from schemas.layout import DataLayout, RunLayout, phases
from schemas.manifest import Manifest, Shard, is_published, shard_url
from schemas.owners import require_output_folder
from schemas.process import cores
from schemas.shard_files.parquet import matrix_array, writing_shard
from schemas.storage import join
from schemas.table import Request, Table, find_reusable, rechunk
from trainer.device import describe_device, open_device
from trainer.encoders.texts import TextFiles, choose_compute
from trainer.inputs import require_inputs
from trainer.model import DataSizes, Model, find_checkpoint, has_bias, load_encoder
from trainer.sizes import PROCESS_BYTES, encoder_bytes
from trainer.stream import open_queries
from trainer.threads import one_thread

KIND = "embeddings"
BLOCK_ROWS = 1 << 13
_READ, _EMBED, _SHARDS = "read", "embed", "shards"


@dataclass(frozen=True)
class Plan:
    """Plan of one run. The launching process makes every choice once, so that all workers agree.

    `source`: Texts, or a table of DATA. `staged`: output of the first flow for Texts. `out`: prefix of the shards.
    """

    source: Texts | Table
    staged: Summary
    out: str
    dtype: str
    device: str
    meter: Meter = field(compare=False)

    @property
    def shards(self) -> int:
        return len(self.source.shards) if isinstance(self.source, Table) else len(self.staged.kept[_READ])

    @property
    def rows(self) -> int:
        return self.source.rows if isinstance(self.source, Table) else self.staged.count(_READ, "rows")

    def write(
        self, shard: int, schema: pa.Schema, embedded: Iterable[tuple[list[pa.ChunkedArray], np.ndarray, str]]
    ) -> Shard:
        """Write a shard from (columns, vectors, description of the vectors). Raises InputError, StorageError."""
        remedy = f"Embed with {option('dtype', 'float32')}, or with another checkpoint."
        group_rows = self.source.manifest.group_rows(shard) if isinstance(self.source, Table) else BLOCK_ROWS
        with writing_shard(self.out, shard, self.shards, schema, group_rows) as out:
            for columns, x, what in embedded:
                vectors = matrix_array(narrow(x, self.dtype, what, remedy), schema.field("vector").type.value_type)
                out.write(pa.table([*columns, vectors], schema=schema))
                self.meter.count(_EMBED, len(x))
        return out.entry

    def summarize(self, kind: str, entry: Shard) -> Summary:
        self.meter.count(_EMBED, 0, entry.bytes)
        return Summary({kind: (entry,)}, {kind: Counter(rows=entry.rows)})


@dataclass(frozen=True)
class RunPlan(Plan):
    """Plan to embed a table with the encoder of a run at `step`; `checkpoint` is the digest of the checkpoint."""

    data: str
    run: str
    step: int
    checkpoint: str
    kind: str  # label embeddings are `vectors` to search, like classifier vectors
    batch: int


def embed(
    data: str,
    run: str,
    out: str,
    options: EmbedOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
    device: str = "auto",
) -> Manifest:
    """Embed the queries of a split, or the label texts, with a checkpoint of RUN. Returns the manifest of OUT.

    OUT has the same shards and row groups as the table; each row of OUT is the embedding x [D] of the corresponding
    row. x is multiplied by classifier vectors, so D includes the bias column if there is a bias. OUT is an `embeddings`
    table for queries, and a `vectors` table for labels. If OUT already exists with the same parents and parameters, it
    is returned. Raises InputError (no such split, run or checkpoint; OUT contains something else; a value too large for
    the dtype), TableError, StorageError.
    """
    data, run, out = (for_workers(beam_options, url) for url in (data, run, out))
    options, layout = options or EmbedOptions(), DataLayout(data)
    require_output_folder(out, "embedded", [data, run])
    if not beam_options:  # remote workers may have packages or devices that this machine lacks
        open_device(device)
    labels = options.what == "labels"
    source = Table.open(layout.labels, "labels") if labels else open_queries(layout, options.split)
    files = [shard_url(source.url, shard) for shard in source.manifest.shards]
    choose_runner(beam_options)  # refuses wrong options before anything is read
    recipe, checkpoint = find_checkpoint(layout, RunLayout(run), options.step)
    require_inputs(source, recipe.encoder.inputs)
    digest, bias = checkpoint.table.digest, has_bias(recipe)
    stated = options.model_dump(exclude={"split"} if labels else None)
    parameters = {**stated, "step": checkpoint.step, "bias": bias}
    parents = {options.what: source.digest, "checkpoint": digest}
    request = Request("vectors" if labels else KIND, parents, parameters)

    def make(job: Job) -> Manifest:
        common = source, Summary(), job.build.url, options.dtype, device, job.watch.meter
        plan = RunPlan(*common, data, run, checkpoint.step, digest, request.kind, options.batch)
        made = job.run_step(_EMBED, plan.rows, range(plan.shards), embed_shard, plan)
        schema, of = written_schema(plan.out, made, plan.kind), source.manifest
        return job.build.publish(describe(request, made, schema, of.row_group_rows, of.id_range))

    width, item = recipe.encoder.dimension + int(bias), np.dtype(options.dtype).itemsize
    needs, remedy = {"embeddings": source.rows * width * item}, f"Give another OUT, or {option('dtype', 'float16')}."
    need = PROCESS_BYTES + encoder_bytes(recipe, DataSizes.of(layout))
    find = functools.partial(find_reusable, out, request, REMEDY)
    work = out, "embedded", find, make, beam_options, progress or silent
    return make_table(*work, needs=needs, remedy=remedy, urls=[*files, out], reads=files[:1], worker_bytes=need)


def embed_shard(shard: int, plan: RunPlan) -> Summary:
    """Write the embeddings of shard `shard`. Raises InputError, TableError, StorageError."""
    source, labels = plan.source, plan.kind == "vectors"
    assert isinstance(source, Table)
    plan.meter.start(_EMBED)
    model = load_run(plan.data, plan.run, plan.step, plan.checkpoint, plan.device)
    schema = (arrow.vectors if labels else arrow.embeddings)(model.width, plan.dtype)
    what = f"{plan.run}, step {plan.step}: the embedding of {source.url}"
    embedded = (
        ([group.column(source.id_column)], model.embed_table(group, plan.batch, labels).cpu().numpy(), what)
        for group in source.batches_of(shard, [source.id_column, *model.columns])
    )
    with one_thread():  # the result does not depend on the number of cores; worker processes share the cores
        return plan.summarize(plan.kind, plan.write(shard, schema, embedded))


@once_a_process
def load_run(data: str, run: str, step: int, checkpoint: str, device: str) -> Model:
    """Load the encoder from the checkpoint whose digest is `checkpoint`."""
    return load_encoder(DataLayout(data), RunLayout(run), step, open_device(device))


@dataclass(frozen=True)
class TextsPlan(Plan):
    """Plan to embed texts with the text model `model`, whose digest is `digest`."""

    model: str
    digest: str
    prompt: str
    compute: str
    threads: int

    def blocks_of(self, shard: int) -> Iterator[pa.Table]:
        """Read the columns query_id, key and text of a shard, a block at a time. Raises TableError, StorageError."""
        if isinstance(self.source, Table):
            names = [self.source.id_column, "key", "text"]
            for rows in rechunk(self.source.batches_of(shard, names), BLOCK_ROWS):
                yield rows.select(names)
            return
        for batch in receive([self.staged.kept[_READ][shard]]):
            ids = pa.array(np.arange(batch.num_rows) + shard * BLOCK_ROWS)
            yield pa.table([ids, batch["key"], batch["text"]], names=["query_id", "key", "text"])


def embed_texts(
    model: str,
    source: str,
    out: str,
    options: EmbedTextsOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
    device: str = "auto",
) -> Manifest:
    """Embed the texts at `source` (files, or a data set) with the text model `model`. Returns the manifest of OUT.

    OUT is an `embeddings` table with key and text, in the order of the input. If OUT already exists with the same
    model, input and parameters, it is returned. Raises InputError (no model, a pickled model, no texts, OUT contains
    something else, a value too large for the dtype), TableError, StorageError.
    """
    say, options = progress or silent, options or EmbedTextsOptions()
    source, out = for_workers(beam_options, source), for_workers(beam_options, out)
    require_output_folder(out, "embedded", [model, source])
    choose_runner(beam_options)  # refuses wrong options before anything is read
    model = for_workers(beam_options, model) if os.path.isdir(model) else model
    files = TextFiles.find(model)
    texts, name, digest = _open_input(source, options)
    what = options.what or ("queries" if isinstance(texts, Table) else "")
    opened = open_device(device)
    compute = choose_compute(options.compute, opened)
    prompt = files.prompt("documents" if what == "labels" else what, options.prompt)
    for line in texts.notes() if isinstance(texts, Texts) else ():
        say(line)
    say(f"{model}: computes in {compute} on {describe_device(opened)}, prompt {prompt!r}")
    if files.assumed:
        say(files.assumed)
    of_files = {"fields": options.fields, "encoding": options.encoding} if isinstance(texts, Texts) else {}
    parameters = {"prompt": prompt, "compute": compute, "device": opened.type, "dtype": options.dtype, **of_files}
    request = Request(KIND, {"model": files.digest, name: digest}, parameters)

    def make(job: Job) -> Manifest:
        work = storage.sha256(repr((request, code_version(), version("torch"), describe_device(opened))).encode())
        kept = Phases(phases(out), work, job.build.claim)
        before = kept.find(_READ)
        if before is None:
            staged = Summary()
            if isinstance(texts, Texts):
                exchange = FileExchange(kept.folder(_READ))
                staged = job.run_step(_READ, None, [texts], read_texts, exchange, job.watch.meter)
            before = _READ, {"summary": as_json(Summary).dump_python(staged, mode="json"), "out": kept.folder(_SHARDS)}
            kept.finish(*before, (_READ, _SHARDS))
        else:
            say(f"{out}: resuming an interrupted run")
        common = texts, as_json(Summary).validate_python(before[1]["summary"]), before[1]["out"], options.dtype, device
        threads = options.threads or (1 if beam_options else cores())
        plan = TextsPlan(*common, job.watch.meter, model, files.digest, prompt, compute, threads)
        made = job.run_step(_EMBED, plan.rows, range(plan.shards), embed_texts_shard, plan)
        group_rows = texts.manifest.row_group_rows if isinstance(texts, Table) else BLOCK_ROWS
        manifest = describe(request, made, written_schema(plan.out, made, KIND), group_rows, (0, plan.rows))
        return replace(job.build, url=plan.out).publish(manifest)

    find = functools.partial(find_reusable, out, request, REMEDY)
    reads = [texts.shard_url(0)] if isinstance(texts, Table) else texts.places()[:1]
    need = PROCESS_BYTES + sum(place.stat().st_size for place in files.folder.rglob("*.safetensors"))
    work = out, "embedded", find, make, beam_options, say
    return make_table(*work, needs={}, reads=reads, in_phases=True, worker_bytes=need)


def read_texts(texts: Texts, files: FileExchange, meter: Meter) -> Summary:
    """Write the rows of all files to staging, BLOCK_ROWS rows per packet. Raises InputError, StorageError."""
    meter.start(_READ)
    summary = Summary(kept={_READ: {}}, counters={_READ: Counter()})
    tables = (pa.Table.from_batches([batch]) for batch in texts.batches(BLOCK_ROWS, features=False))
    for number, block in enumerate(rechunk(tables, BLOCK_ROWS)):
        summary.kept[_READ].update(files.send([(number, to_record_batch(block))]))
        summary.counters[_READ]["rows"] += block.num_rows
        meter.count(_READ, block.num_rows)
    return summary


def embed_texts_shard(shard: int, plan: TextsPlan) -> Summary:
    """Write the vectors of shard `shard` unless they already exist. Raises InputError, TableError, StorageError."""
    plan.meter.start(_EMBED)
    place = join(plan.out, f"{shard}.json")
    try:
        entry = Shard.model_validate_json(storage.read_sealed(place, "The file will be written again."))
        plan.meter.count(_EMBED, entry.rows)
    except (FileNotFoundError, TableError):
        model = load_texts_model(plan.model, plan.digest, plan.device, plan.compute, plan.prompt)
        schema = arrow.texts(model.embed([""]).shape[1], plan.dtype)
        embedded = (
            (
                rows.columns,
                model.embed(rows.column("text").to_pylist(), plan.threads),
                f"{plan.model}: the vector of a text from row {rows[0][0].as_py():,} on",
            )
            for rows in plan.blocks_of(shard)
        )
        entry = plan.write(shard, schema, embedded)
        storage.write_sealed(place, entry.model_dump_json().encode())
    return plan.summarize(KIND, entry)


def _open_input(source: str, options: EmbedTextsOptions) -> tuple[Texts | Table, str, str]:
    """Return the input to embed, its name among the parents, and its digest. Raises InputError, TableError."""
    if not (is_published(source) and Table.open(source).kind == "data"):
        texts = Texts(source, fields=parse_fields(options.fields or ""), encoding=options.encoding)
        digests = [base.identify(url)[1] for url in texts.places()]
        return texts, "input", storage.sha256("".join(digests).encode())
    layout = DataLayout(source)
    labels = options.what in ("labels", "documents")
    table = Table.open(layout.labels, "labels") if labels else open_queries(layout, options.split)
    if "text" not in table.columns:
        raise InputError(
            f"{table.url}: no column text; found: {', '.join(table.columns)}. Shard with {option('keep_text', True)}, "
            "or give the raw files of DATA as INPUT."
        )
    return table, table.kind, table.digest
