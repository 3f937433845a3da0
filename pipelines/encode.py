"""`extremis embed MODEL INPUT OUT`: vectors of texts by any model of texts, in the order of INPUT.

    files of texts ─▶ blocks of rows in staging                                                  (then the plan)
    shards ─▶ embed and write ─▶ sum up ─▶ publish

A shard is one block of rows, or a shard of DATA: INPUT alone decides it. A shard that is written stays for a run that
goes on after one that was cut off. Memory is bounded by the model, one block of rows and a batch a thread.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from pipelines.common.exchange import Files, one_batch, receive
from pipelines.common.flow import Flow
from pipelines.common.progress import Meter, Progress, Watch, silent
from pipelines.common.summary import Summary, describe, read_summary, write_sum, written_schema
from pipelines.common.vectors import rechunk
from pipelines.embed import narrow
from pipelines.formats import lines
from pipelines.formats.names import parse_fields
from pipelines.formats.texts import STANDARD, Texts
from pipelines.options import EncodeOptions
from pipelines.runners.runner import choose_runner, for_workers
from pipelines.sharding.resume import Phases
from schemas import arrow, storage
from schemas.cores import cores
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout, phases, staging
from schemas.manifest import Manifest, Shard, code_version, is_published
from schemas.owners.build import building, clean_up
from schemas.owners.place import require_place
from schemas.reuse import Request, find_reusable
from schemas.shard_files.parquet import matrix_array, writing_shard
from schemas.storage import join
from schemas.table import Table
from trainer.device import describe_device, open_device
from trainer.encoders.texts import TextFiles, TextModel, choose_compute
from trainer.stream import open_queries

KIND = "embeddings"
BLOCK_ROWS = 1 << 13
_READ, _EMBED, _SHARDS = "read", "embed", "shards"
_AS_JSON = TypeAdapter(Summary)
_LOADING = threading.Lock()


@dataclass(frozen=True)
class EncodePlan:
    """Plan of one run: every choice, made once in the launching process, so that all workers agree.

    `source`: Texts, or a table of DATA. `staged`: what the first flow left of Texts. `out`: the prefix of the shards.
    """

    model: str
    digest: str
    prompt: str
    compute: str
    device: str
    threads: int
    dtype: str
    source: Texts | Table
    out: str = ""
    staged: Summary = field(default_factory=Summary)
    meter: Meter = field(default=Meter(), compare=False)

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.source.shards) if isinstance(self.source, Table) else len(self.staged.kept[_READ])

    @property
    def rows(self) -> int:
        """N."""
        return self.source.rows if isinstance(self.source, Table) else self.staged.count(_READ, "rows")

    def group_rows(self, shard: int) -> int | tuple[int, ...]:
        """Return the rows of each row group of a shard."""
        return self.source.manifest.group_rows(shard) if isinstance(self.source, Table) else BLOCK_ROWS

    def blocks_of(self, shard: int) -> Iterator[pa.Table]:
        """Read the columns query_id, key and text of a shard, a block at a time. Raises TableError, StorageError."""
        if isinstance(self.source, Table):
            names = [self.source.id_column, "key", "text"]
            for rows in rechunk(self.source.batches_of(shard, names), BLOCK_ROWS):
                yield rows.select(names).rename_columns(["query_id", "key", "text"])
            return
        for batch in receive([self.staged.kept[_READ][shard]]):
            ids = pa.array(np.arange(batch.num_rows) + shard * BLOCK_ROWS)
            yield pa.table([ids, batch["key"], batch["text"]], names=["query_id", "key", "text"])


def encode(
    model: str,
    source: str,
    out: str,
    options: EncodeOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
    device: str = "auto",
) -> Manifest:
    """Embed the texts at `source`, files or a data set, with the model of texts `model`: the manifest of OUT.

    OUT is an `embeddings` table with key and text, in the order of the input. A finished OUT of the same model, input
    and parameters is returned as it is. Raises InputError (no model, one that is pickled, no texts, OUT holds something
    else, a value too large for the dtype), TableError, StorageError.
    """
    say, options = progress or silent, options or EncodeOptions()
    source, out = for_workers(beam_options, source), for_workers(beam_options, out)
    require_place(out, "embedded", [model, source])
    choose_runner(beam_options)  # refuses wrong options before anything is read
    model = for_workers(beam_options, model) if os.path.isdir(model) else model
    files = TextFiles.find(model)
    texts, name, digest = _open_input(source, options)
    what = options.what or ("queries" if isinstance(texts, Table) else "")
    opened = open_device(device)
    compute = choose_compute(options.compute, opened)
    prompt = files.prompt({"labels": "documents"}.get(what, what), options.prompt)
    say(f"{model}: computes in {compute} on {describe_device(opened)}, prompt {prompt!r}")
    if files.assumed:
        say(files.assumed)
    threads = options.threads or (1 if beam_options else cores())
    plan = EncodePlan(model, files.digest, prompt, compute, device, threads, options.dtype, texts)
    named = {"prompt": prompt, "compute": compute, "device": opened.type, "dtype": options.dtype}
    parameters = {**named, "fields": options.fields} if isinstance(texts, Texts) else named
    request = Request(KIND, {"model": plan.digest, name: digest}, parameters)
    remedy = "Give another OUT, or remove it first."
    finished = find_reusable(out, request, remedy)
    if finished is not None:
        clean_up(out, "embedded")
        return finished
    places = [texts.place(0)] if isinstance(texts, Table) else texts.places()
    with choose_runner(beam_options) as runner, building(out, "embedded", say, in_phases=True) as build:
        finished = find_reusable(out, request, remedy)  # the last owner may have made it
        if finished is not None:
            return finished
        watch = Watch(staging(build.url), say)
        plan = replace(plan, meter=watch.meter)
        runner.check(places[:1], build.url, say)
        work = storage.sha256(repr((request, code_version(), version("torch"), describe_device(opened))).encode())
        kept = Phases(phases(out), work, build.claim)
        before = kept.find(_READ)
        if before is None:
            summary, url = Summary(), join(build.url, "read.json")
            if isinstance(texts, Texts):
                flow = Flow()
                read = flow.create("Input", [texts]).map("Read", read_texts, Files(kept.folder(_READ)), watch.meter)
                write_sum(read, url)
                watch.expect({_READ: None})
                runner.run(flow, watch)
                summary = read_summary(url)
            before = _READ, {"summary": _AS_JSON.dump_python(summary, mode="json"), "out": kept.folder(_SHARDS)}
            kept.finish(*before, (_READ, _SHARDS))
        else:
            say(f"{out}: goes on from an earlier run that was cut off")
        plan = replace(plan, staged=_AS_JSON.validate_python(before[1]["summary"]), out=before[1]["out"])
        watch.expect({_EMBED: plan.rows})
        flow, url = Flow(), join(build.url, "embed.json")
        write_sum(flow.create("Shards", range(plan.shards)).map("Embed texts", encode_shard, plan), url)
        runner.run(flow, watch)
        group_rows = texts.manifest.row_group_rows if isinstance(texts, Table) else BLOCK_ROWS
        made = read_summary(url)
        schema = written_schema(plan.out, made, KIND)
        manifest = replace(build, url=plan.out).publish(describe(request, made, schema, group_rows, (0, plan.rows)))
        watch.summarize()
        return manifest


def read_texts(texts: Texts, files: Files, meter: Meter) -> Summary:
    """Leave the rows of all files in staging, BLOCK_ROWS rows a packet. Raises InputError, StorageError."""
    meter.start(_READ)
    summary = Summary(kept={_READ: {}}, counters={_READ: Counter()})
    tables = (pa.Table.from_batches([batch]) for batch in texts.batches(BLOCK_ROWS, features=False))
    for number, block in enumerate(rechunk(tables, BLOCK_ROWS)):
        summary.kept[_READ].update(files.send([(number, one_batch(block))]))
        summary.counters[_READ]["rows"] += block.num_rows
        meter.count(_READ, block.num_rows)
    return summary


def encode_shard(shard: int, plan: EncodePlan) -> Summary:
    """Write the vectors of shard `shard`, unless an earlier run has. Raises InputError, TableError, StorageError."""
    plan.meter.start(_EMBED)
    place = join(plan.out, f"{shard}.json")
    try:
        entry = Shard.model_validate_json(storage.read_sealed(place, "It is made again."))
        plan.meter.count(_EMBED, entry.rows)
    except (FileNotFoundError, TableError):
        entry = _write(shard, plan)
        storage.write_sealed(place, entry.model_dump_json().encode())
    plan.meter.count(_EMBED, 0, entry.bytes)
    return Summary({KIND: (entry,)}, {KIND: Counter(rows=entry.rows)})


def _write(shard: int, plan: EncodePlan) -> Shard:
    model = _shared_model(plan.model, plan.digest, plan.device, plan.compute, plan.prompt)
    schema = arrow.texts(model.embed([""]).shape[1], plan.dtype)
    with writing_shard(plan.out, shard, plan.shards, schema, plan.group_rows(shard)) as out:
        for rows in plan.blocks_of(shard):
            x = model.embed(rows.column("text").to_pylist(), plan.threads)
            x = narrow(x, plan.dtype, f"{plan.model}: the vector of a text behind row {rows['query_id'][0].as_py():,}")
            vectors = matrix_array(x, schema.field("vector").type.value_type)
            out.write(pa.table([*rows.columns, vectors], schema=schema))
            plan.meter.count(_EMBED, rows.num_rows)
    return out.entry


@lru_cache(maxsize=1)
def _open_model(name: str, digest: str, device: str, compute: str, prompt: str) -> TextModel:
    files = TextFiles.find(name)
    if files.digest != digest:
        raise InputError(f"{name}: on a worker this is another model than at the start. Give all the same files.")
    return files.open(open_device(device), compute, prompt)


def _shared_model(*named: str) -> TextModel:
    """Open the model, once a process; another one is let go."""
    with _LOADING:
        return _open_model(*named)


def _open_input(source: str, options: EncodeOptions) -> tuple[Texts | Table, str, str]:
    """Return what is embedded, its name among the parents, and its digest. Raises InputError, TableError."""
    if not (is_published(source) and Table.open(source).kind == "data"):
        if source == STANDARD:
            raise InputError("INPUT - : texts are read more than once. Write standard input to a file, and name it.")
        texts = Texts(source, fields=parse_fields(options.fields or ""))
        digests = [lines.identify(url)[1] for url in texts.places()]
        return texts, "input", storage.sha256("".join(digests).encode())
    layout = DataLayout(source)
    labels = options.what in ("labels", "documents")
    table = Table.open(layout.labels, "labels") if labels else open_queries(layout, options.split)
    if "text" not in table.columns:
        raise InputError(
            f"{table.url}: no column text; there are {', '.join(table.columns)}. Shard with --keep-text, or give the "
            "files that DATA was made from as INPUT."
        )
    return table, table.kind, table.digest
