"""`extremis mine QUERIES VECTORS`: hard negatives from vectors in files, of any model.

    ranges of rows ─▶ read, check and write as tables ─▶ sum up ─▶ publish          (then mine them as any other tables)

OUT/data is a data set whose queries and labels have no tokens; OUT/embeddings has their vectors, aligned with them.
"""

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.arrays.files import KEY, TEXT, VECTOR, Names, RowFiles, open_files
from pipelines.arrays.positives import Keys, files_of, read_positives
from pipelines.common.exchange import Files, Packet, receive
from pipelines.common.flow import Flow
from pipelines.common.progress import Meter, Progress, Watch, silent
from pipelines.common.summary import Summary, read_summary, write_sum
from pipelines.formats import lines
from pipelines.formats.names import parse_fields_by_table
from pipelines.mine import mine
from pipelines.options import ArrayOptions, default_row_group_rows, default_shards
from pipelines.runners.runner import choose_runner, for_workers
from schemas import arrow, storage
from schemas.errors import InputError
from schemas.layout import DataLayout, staging
from schemas.manifest import Manifest, columns_of, is_published, unpublish
from schemas.owners.build import Build, building
from schemas.owners.claim import claimed
from schemas.owners.place import require_place
from schemas.ragged import Ragged
from schemas.reuse import Request, find_reusable
from schemas.shard_files.parquet import list_array, writing_shard
from schemas.sizes import require_room
from schemas.storage import join

WIDTH = 50  # K, unless it is stated
_GROUP_BYTES = 8 << 20  # of the vectors of a row group
_SHARD_BYTES, _TEXT_BYTES = 128 << 20, 256
_STEP = "import vectors"
_REMEDY = "Give another --out, or --overwrite to replace it."


@dataclass(frozen=True)
class Side:
    """Queries or documents: files of vectors, with keys and texts in them, or in `texts` row by row.

    `table` and `embeddings` are paths below OUT; `labels`: L, documents, which decides the type of the queries' labels.
    """

    table: str
    embeddings: str
    id_column: str
    labels: int
    vectors: RowFiles
    texts: RowFiles | None

    @property
    def keyed(self) -> RowFiles:
        """Files that have the keys, if there are any."""
        return self.texts or self.vectors

    @property
    def rows(self) -> int:
        """N, or L."""
        return self.vectors.rows

    @property
    def schemas(self) -> tuple[pa.Schema, pa.Schema]:
        """Schemas of the table and of its vectors."""
        names = {self.id_column: pa.int64(), KEY: pa.string()}
        if self.id_column == "query_id":
            names |= {"label_ids": pa.list_(arrow.label_type(self.labels))}
            names |= {TEXT: pa.string()} if self.keyed.has(TEXT) else {}
        else:
            names |= {TEXT: pa.string(), "frequency": pa.int64()}
        make = arrow.embeddings if self.id_column == "query_id" else arrow.vectors
        return arrow.without_nulls(names), make(self.vectors.dimension, self.vectors.stored)

    @property
    def vector_bytes(self) -> int:
        """Bytes of one vector in its table."""
        return self.vectors.dimension * np.dtype(self.vectors.stored).itemsize

    @property
    def group_rows(self) -> int:
        """Rows of a row group, whose size in memory is bounded."""
        return max(1, min(default_row_group_rows(self.rows), _GROUP_BYTES // self.vector_bytes))

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Rows [start, stop) of each shard, whole row groups but for the last."""
        size = self.rows * (self.vector_bytes + _TEXT_BYTES * self.keyed.has(TEXT))
        shards = default_shards(self.rows, size, _SHARD_BYTES)
        step = -(-self.rows // (shards * self.group_rows)) * self.group_rows
        return [(start, min(start + step, self.rows)) for start in range(0, self.rows, step)]

    def read(self, start: int, stop: int, cosine: bool) -> Iterator[tuple[np.ndarray, pa.Table]]:
        """Yield (ids, columns) of rows [start, stop), a row group at a time; a row without a key has its number."""
        beside = self.texts.read(start, stop, self.group_rows, {KEY, TEXT}) if self.texts else None
        for rows in self.vectors.read(start, stop, self.group_rows, {KEY, TEXT, VECTOR}, cosine):
            ids = np.arange(start, start + rows.num_rows)
            columns = {KEY: pa.array(ids).cast(pa.string()), TEXT: pa.array([""] * len(ids))}
            for found in (rows, next(beside)) if beside else (rows,):
                columns |= dict(zip(found.column_names, found.columns, strict=True))
            yield ids, pa.table(columns)
            start += len(ids)


@dataclass(frozen=True)
class ImportPlan:
    """Plan of one import, whose workers write below `url`."""

    url: str
    sides: tuple[Side, Side]
    cosine: bool
    meter: Meter = field(default=Meter(), compare=False)

    @property
    def summary(self) -> str:
        """URL of what the workers report."""
        return join(staging(self.url), "summary.json")


def mine_arrays(
    queries: str,
    documents: str,
    options: ArrayOptions,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Manifest]:
    """Mine negatives of each vector at `queries` among those at `documents`: the manifest of the table at OUT/queries.

    Vectors are [N, D] and [L, D] of float16, float32 or float64, or bfloat16 in safetensors. A finished OUT of the same
    content and options is returned as it is; what was cut off is gone on from. Raises InputError (bad input: file, row
    and remedy; OUT holds something else; wrong options), StorageError; a table is there whole or not.
    """
    say, place = progress or silent, functools.partial(for_workers, beam_options)
    options, queries, documents = options.for_workers(place), place(queries), place(documents)
    if options.out is None:
        raise InputError("--out: say where the tables of these vectors go, with --out URL.")
    out = options.out
    choose_runner(beam_options)  # refuses wrong options before anything is read
    names, of_labels = parse_fields_by_table(options.fields or "", Names())
    sources = ((queries, options.query_texts, names), (documents, options.document_texts, of_labels or names))
    require_place(out, "mined", [queries, documents, options.query_texts, options.document_texts, options.positives])
    opened = [_open(*source) for source in sources]
    sides = (
        Side("data/queries/train", "embeddings/queries", "query_id", opened[1][0].rows, *opened[0]),
        Side("data/labels", "embeddings/labels", "label_id", opened[1][0].rows, *opened[1]),
    )
    (a, b) = (side.vectors for side in sides)
    if a.dimension != b.dimension:
        raise InputError(f"{a.source}: vectors of {a.dimension} dimensions, those of {b.source} have {b.dimension}.")
    read = {"queries": sides[0], "vectors": sides[1]}
    urls = {
        name: [file.url for each in (side.vectors, side.texts) if each for file in each.files]
        for name, side in read.items()
    }
    urls |= {"positives": files_of(options.positives)} if options.positives else {}
    stated = {
        **{name: _identity(some) for name, some in urls.items()},
        "metric": options.metric,
        "fields": [vars(each[2]) for each in sources],
    }
    request = Request("data", None, stated, section="options")
    find = functools.partial(
        find_reusable, DataLayout(join(out, "data")).root, request, _REMEDY, overwrite=options.overwrite
    )
    mining = options.model_copy(
        update={
            "queries": join(out, sides[0].embeddings),
            "vectors": join(out, sides[1].embeddings),
            "width": options.width or WIDTH,
        }
    )
    # RUN is a folder that no run is in: nothing is read from it, and the tables go to OUT.
    carry_on = functools.partial(mine, join(out, "data"), join(out, "embeddings"), None, mining, beam_options, say)
    if find() is not None:
        return carry_on()
    with claimed(out, "mined", say):
        if find() is None:  # else the last owner has made it
            _import(out, sides, stated, options, [*urls["queries"], *urls["vectors"]], beam_options, say)
        return carry_on()


def _open(source: str, texts: str | None, names: Names) -> tuple[RowFiles, RowFiles | None]:
    """Open vectors, and keys and texts beside them. Raises InputError: not as many rows, or no column of a name."""
    vectors = open_files(source, names)
    beside = open_files(texts, names, vectors=False) if texts else None
    if beside and beside.rows != vectors.rows:
        raise InputError(
            f"{texts}: {beside.rows:,} rows of keys or texts, but {vectors.rows:,} vectors in {source}. Give as many."
        )
    found = beside or vectors
    for role, name in vars(names).items():
        if role != VECTOR and name != getattr(Names(), role) and not found.has(role):
            there = ", ".join(found.files[0].names) or "vectors alone"
            raise InputError(f"--fields {role}={name}: {found.source} has no such column; found: {there}.")
    return vectors, beside


def _identity(urls: Sequence[str]) -> dict[str, Any]:
    """Return number, bytes and digest of the files, wherever they are."""
    with ThreadPoolExecutor() as pool:
        known = list(pool.map(lines.identify, urls))
    digest = storage.sha256(json.dumps([sha256 for _, sha256 in known]).encode())
    return {"file": f"{len(urls)} file(s)", "bytes": sum(size for size, _ in known), "sha256": digest}


def _import(
    out: str,
    sides: tuple[Side, Side],
    stated: Mapping[str, Any],
    options: ArrayOptions,
    urls: Sequence[str],
    beam_options: Sequence[str],
    say: Progress,
) -> None:
    """Make and publish the tables at OUT; the data set last. Raises InputError, StorageError."""
    if is_published(join(out, "queries")) and not options.overwrite:
        raise InputError(f"{out}: holds hard negatives that were mined from something else. {_REMEDY}")
    sizes = {"vectors": sum(side.rows * side.vector_bytes for side in sides)}
    require_room(out, sizes, "Give another --out.")
    for side in sides:
        shape = f"{side.rows:,} × {side.vectors.dimension} {side.vectors.files[0].dtype}"
        keys = "keys" if side.keyed.has(KEY) else "no keys: the row number is the key"
        say(f"{side.vectors.source}: {shape}, {keys}" + (", texts" if side.keyed.has(TEXT) else ""))
    keys = [Keys.of(side.keyed) for side in sides]
    pairs = read_positives(options.positives, *keys, say) if options.positives else Ragged.empty(sides[0].rows)
    with choose_runner(beam_options, urls) as runner, building(out, "mined") as build:
        watch = Watch(staging(build.url), say)
        watch.expect({_STEP: sum(side.rows for side in sides)})
        plan = ImportPlan(build.url, sides, options.metric == "cosine", watch.meter)
        runner.check(urls[:1], build.url, say)
        flow = Flow()
        items = flow.create("Ranges", Files(join(staging(build.url), "pairs")).send(_pairs_by_shard(sides, pairs)))
        write_sum(items.map("Import rows", import_rows, plan), plan.summary)
        runner.run(flow, watch)
        unpublish(join(out, "data"))
        storage.remove(join(out, "queries"), recursive=True)
        _publish(build, sides, read_summary(plan.summary), stated)
        watch.summarize()


def _pairs_by_shard(sides: tuple[Side, Side], pairs: Ragged) -> Iterator[tuple[tuple[int, int], pa.RecordBatch]]:
    """Yield ((side, shard), column): positives of the queries, and how often each document is one."""
    queries, labels = sides
    for shard, (start, stop) in enumerate(queries.bounds):
        values, offsets = pairs.slice(start, stop)
        column = list_array(values, offsets, arrow.label_type(labels.rows))
        yield (0, shard), pa.record_batch([column], ["label_ids"])
    frequency = np.bincount(pairs.entries, minlength=labels.rows)
    for shard, (start, stop) in enumerate(labels.bounds):
        yield (1, shard), pa.record_batch([pa.array(frequency[start:stop], pa.int64())], ["frequency"])


def import_rows(element: tuple[tuple[int, int], Packet], plan: ImportPlan) -> Summary:
    """Write one shard of a table, and that of its vectors. Raises InputError that names file and row; StorageError."""
    (number, shard), packet = element
    side = plan.sides[number]
    plan.meter.start(_STEP)
    (start, stop), count, group = side.bounds[shard], len(side.bounds), side.group_rows
    of_rows, of_vectors = side.schemas
    (pairs,) = receive([packet])
    with (
        writing_shard(join(plan.url, side.table), shard, count, of_rows, group) as rows,
        writing_shard(join(plan.url, side.embeddings), shard, count, of_vectors, group) as vectors,
    ):
        for ids, columns in side.read(start, stop, plan.cosine):
            some = pairs.slice(int(ids[0]) - start, len(ids))
            known = {side.id_column: pa.array(ids), **dict(zip(some.schema.names, some.columns, strict=True))}
            for schema, file in ((of_rows, rows), (of_vectors, vectors)):
                file.write(
                    pa.table(
                        [known.get(n, columns[n] if n not in known else None) for n in schema.names], schema=schema
                    )
                )
            plan.meter.count(_STEP, len(ids))
    plan.meter.count(_STEP, 0, rows.entry.bytes + vectors.entry.bytes)
    entries = {side.table: (rows.entry,), side.embeddings: (vectors.entry,)}
    mentions = len(pairs.column(0).flatten()) if number == 0 else 0
    return Summary(entries, {side.table: Counter(rows_out=stop - start, labels=mentions)})


def _publish(build: Build, sides: tuple[Side, Side], summary: Summary, stated: Mapping[str, Any]) -> None:
    parents: dict[str, str] = {}
    facts = {"labels": sides[1].rows, "split": "train"}, {"training_points": sides[0].rows}
    for side, parameters, what in zip(sides, facts, ("queries", "labels"), strict=True):
        put = functools.partial(_put, build, side, summary)
        digest = put(what, side.table, side.schemas[0], {}, parameters)
        parents[side.table.removeprefix("data/")] = digest
        kind = "embeddings" if what == "queries" else "vectors"
        put(kind, side.embeddings, side.schemas[1], {what: digest}, {"what": what})
    manifest = Manifest(kind="data", parents=parents, parameters={"format": "vectors", "options": dict(stated)})
    Build(join(build.out, "data"), join(build.url, "data"), build.claim).publish(manifest)


def _put(
    build: Build,
    side: Side,
    summary: Summary,
    kind: str,
    path: str,
    schema: pa.Schema,
    parents: dict[str, str],
    parameters: dict[str, Any],
) -> str:
    """Put one table in place; its digest."""
    manifest = Manifest(
        kind=kind,
        columns=columns_of(schema),
        shards=summary.shards_of(path),
        rows=side.rows,
        row_group_rows=side.group_rows,
        id_range=(0, side.rows),
        parents=parents,
        parameters=parameters,
        counters=dict(summary.counters.get(path, {})),
    )
    return Build(join(build.out, path), join(build.url, path), build.claim).publish(manifest).digest
