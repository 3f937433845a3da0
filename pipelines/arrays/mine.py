"""`extremis mine QUERIES VECTORS`: mine hard negatives from files that contain vectors of any model.

    ranges of rows ─▶ read, check, write as tables ─▶ sum up ─▶ publish        (then the tables are mined)

OUT/data is a data set of queries and labels without tokens. OUT/embeddings contains the vectors of the queries and
labels, in the same order. If the vectors belong to the rows of an existing data set, that data set replaces OUT/data,
and its stream can join OUT/queries.
"""

import contextlib
import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.arrays.files import KEY, TEXT, VECTOR, ColumnNames, RowFiles, open_files
from pipelines.arrays.positives import KeyLookup, list_pair_files, read_positives
from pipelines.common.progress import Meter, Progress, silent
from pipelines.flow import FileExchange, Packet, receive
from pipelines.formats import lines
from pipelines.formats.names import parse_fields_by_table
from pipelines.job import Job, Summary, describe, make_table
from pipelines.mine import mine
from pipelines.options import ArrayOptions, default_row_group_rows, default_shards
from pipelines.runners.local import choose_runner, for_workers
from schemas import arrow, storage
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.manifest import Manifest, Shard, is_published, unpublish
from schemas.owners.build import Build
from schemas.owners.claim import claimed
from schemas.owners.outputs import require_output_folder
from schemas.ragged import Ragged, offsets_of
from schemas.reuse import Request, find_reusable
from schemas.shard_files.parquet import list_array, writing_shard
from schemas.storage import join
from schemas.table import Table

WIDTH = 50  # default of K
_GROUP_BYTES, _SHARD_BYTES = 8 << 20, 128 << 20  # size of the vectors; a text counts as _TEXT_BYTES
_TEXT_BYTES = 256
_STEP = "import vectors"
_REMEDY = "Give another --out, or --overwrite to replace OUT."


@dataclass(frozen=True)
class Side:
    """The queries, or the documents (named `labels`), with their files of vectors and their files of keys and texts.

    `label_count` is the number of labels. Under OUT, the rows are stored in `table`, and the vectors in `embeddings`,
    which is cut like the `existing` table of a data set, if there is one.
    """

    name: str
    label_count: int
    vectors: RowFiles
    text_files: RowFiles | None
    existing: Table | None = None
    same_key: bool = False  # a document with the key of a query is the query's filter pair, unless it is a positive

    @property
    def table(self) -> str:
        return "data/labels" if self.name == "labels" else "data/queries/train"

    @property
    def embeddings(self) -> str:
        return f"embeddings/{self.name}"

    @property
    def keyed(self) -> RowFiles:
        """Files that contain the keys and texts: `text_files` if given, otherwise the vector files."""
        return self.text_files or self.vectors

    @property
    def schemas(self) -> tuple[pa.Schema, pa.Schema]:
        """Schemas of the table of rows and of the table of vectors."""
        shape = self.vectors.dimension, self.vectors.stored
        if self.name == "labels":
            types = {"label_id": pa.int64(), KEY: pa.string(), TEXT: pa.string(), "frequency": pa.int64()}
            return arrow.without_nulls(types), arrow.vectors(*shape)
        types = {"query_id": pa.int64(), KEY: pa.string(), "label_ids": pa.list_(arrow.label_type(self.label_count))}
        types |= {"filter_label_ids": types["label_ids"]} if self.same_key else {}
        types |= {TEXT: pa.string()} if self.keyed.has(TEXT) else {}
        return arrow.without_nulls(types), arrow.embeddings(*shape)

    @property
    def written(self) -> dict[str, pa.Schema]:
        """Tables to write, and their schemas."""
        rows, vectors = self.schemas
        return ({} if self.existing else {self.table: rows}) | {self.embeddings: vectors}

    @property
    def vector_bytes(self) -> int:
        return self.vectors.dimension * np.dtype(self.vectors.stored).itemsize

    @property
    def group_rows(self) -> int:
        """Number of rows per row group, chosen to limit the memory that a row group needs."""
        return max(1, min(default_row_group_rows(self.vectors.rows), _GROUP_BYTES // self.vector_bytes))

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Row range [start, stop) of each shard; all new shards except the last consist of full row groups."""
        rows = self.vectors.rows
        if self.existing:
            return [*itertools.pairwise(offsets_of(np.array([entry.rows for entry in self.existing.shards])).tolist())]
        shards = default_shards(rows, rows * (self.vector_bytes + _TEXT_BYTES * self.keyed.has(TEXT)), _SHARD_BYTES)
        step = -(-rows // (shards * self.group_rows)) * self.group_rows
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    def read(self, start: int, stop: int, cosine: bool) -> Iterator[dict[str, pa.Array]]:
        """Yield the columns of rows [start, stop), one row group at a time; without keys, row numbers are the keys."""
        keyed = self.keyed.read(start, stop, self.group_rows, {KEY, TEXT}) if self.text_files else None
        for rows in self.vectors.read(start, stop, self.group_rows, {KEY, TEXT, VECTOR}, cosine):
            ids = pa.array(np.arange(start, start + rows.num_rows))
            columns = {self.schemas[0].names[0]: ids, KEY: ids.cast(pa.string()), TEXT: pa.array([""] * len(ids))}
            for table in (rows, next(keyed)) if keyed else (rows,):
                columns |= dict(zip(table.column_names, table.columns, strict=True))
            yield columns
            start += rows.num_rows


@dataclass(frozen=True)
class ImportPlan:
    """Plan of one import. Workers write below `url`."""

    url: str
    sides: Sequence[Side]
    cosine: bool
    meter: Meter = field(default=Meter(), compare=False)


def mine_arrays(
    queries: str,
    documents: str,
    options: ArrayOptions,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Manifest]:
    """Mine negatives from `documents` for each vector at `queries`. Returns the manifest of the table at OUT/queries.

    The vectors of queries [N, D] and documents [L, D] are float16, float32 or float64, or bfloat16 in safetensors. If
    `positives` is a data set, the vectors belong to the rows of its split `train` and to its labels. If OUT is already
    complete with the same content and options, it is returned; an interrupted run resumes. Readers never see an
    incomplete table. Raises InputError (invalid input, with file, row and remedy; OUT contains something else;
    invalid options), StorageError.
    """
    say, place = progress or silent, functools.partial(for_workers, beam_options)
    options, queries, documents = options.for_workers(place), place(queries), place(documents)
    if options.out is None:
        raise InputError("--out is missing: specify where to write the tables with --out URL.")
    out = options.out
    choose_runner(beam_options)  # refuses wrong options before anything is read
    require_output_folder(
        out, "mined", [queries, documents, options.query_texts, options.document_texts, options.positives]
    )
    existing = _open_data(options)
    names, of_labels = parse_fields_by_table(options.fields or "", ColumnNames())
    opened = _open(queries, options.query_texts, names), _open(documents, options.document_texts, of_labels or names)
    sides = [
        Side(name, opened[1][0].rows, *files, table, same_key=options.same_key == "filter")
        for name, files, table in zip(("queries", "labels"), opened, existing or (None, None), strict=True)
    ]
    if options.same_key == "filter" and (existing or not all(side.keyed.has(KEY) for side in sides)):
        where = "DATA has its own filter pairs" if existing else "both sides need keys, but one has only row numbers"
        raise InputError(f"--same-key filter: {where}. Leave the option out.")
    for side in sides:
        if side.existing and side.existing.rows != side.vectors.rows:
            raise InputError(
                f"{side.vectors.source}: {side.vectors.rows:,} vectors, but {side.existing.url} has "
                f"{side.existing.rows:,} rows. Give one vector for each row, in row order."
            )
    dimensions = [side.vectors.dimension for side in sides]
    if len({*dimensions}) > 1:
        raise InputError(
            f"{queries}: vectors of {dimensions[0]} dimensions, but the vectors in {documents} have {dimensions[1]}. "
            "Embed queries and documents with the same model."
        )
    stated: dict[str, Any] = {
        side.name: _identity([file.url for some in (side.vectors, side.text_files) if some for file in some.files])
        for side in sides
    }
    stated["positives"] = _identity(list_pair_files(options.positives)) if options.positives and not existing else None
    stated |= {f"rows_of_{side.name}": side.existing.digest for side in sides if side.existing}
    stated |= {"metric": options.metric or "inner", "fields": vars(names), "fields_of_labels": vars(of_labels or names)}
    stated |= {"same_key": "filter"} if options.same_key == "filter" else {}
    last, kind = (sides[1].embeddings, "vectors") if existing else ("data", "data")  # the last table of an import
    request = Request(kind, None, stated, section="arrays")

    def find() -> Manifest | None:
        if existing and is_published(join(out, "data")):  # OUT is from an import with pairs
            return None
        return find_reusable(join(out, last), request, _REMEDY, overwrite=options.overwrite)

    places = {name: join(out, side.embeddings) for name, side in zip(("queries", "vectors"), sides, strict=True)}
    mining = options.model_copy(update={**places, "width": options.width or WIDTH})
    # RUN is a folder without a run: nothing is read from it, and the tables go to OUT.
    data = options.positives if existing and options.positives else join(out, "data")
    go_on = functools.partial(mine, data, join(out, "embeddings"), None, mining, beam_options, say)
    if find() is not None:
        return go_on()
    with claimed(out, "mined", say):
        if find() is None:  # else the previous owner of the claim has imported the vectors
            _import(out, sides, stated, options, beam_options, say)
        return go_on()


def _open_data(options: ArrayOptions) -> tuple[Table, Table] | None:
    """Open the training queries and the labels of the data set `positives`; None if `positives` is not a data set.

    Raises InputError for texts in addition to the data set's texts; TableError.
    """
    data = options.positives
    if data is None or not (is_published(data) and Table.open(data).kind == "data"):
        return None
    for flag, texts in (("--query-texts", options.query_texts), ("--document-texts", options.document_texts)):
        if texts:
            raise InputError(f"{flag} {texts}: keys and texts come from {data}. Leave {flag} out.")
    layout = DataLayout(data)
    return Table.open(layout.queries("train"), "queries"), Table.open(layout.labels, "labels")


def _open(source: str, texts: str | None, names: ColumnNames) -> tuple[RowFiles, RowFiles | None]:
    """Open vectors, and separate files of keys and texts. Raises InputError if row counts or columns do not match."""
    vectors = open_files(source, names)
    beside = open_files(texts, replace(names, vector="")) if texts else None
    if beside and beside.rows != vectors.rows:
        raise InputError(
            f"{texts}: {beside.rows:,} rows, but {vectors.rows:,} vectors in {source}. Give one row for each vector."
        )
    found = beside or vectors
    for role in (KEY, TEXT):
        name = getattr(names, role)
        if name != role and not found.has(role):
            there = ", ".join(found.files[0].names) or "vectors alone"
            raise InputError(
                f"--fields {role}={name}: {found.source} has no such column; found: {there}. Fix the name."
            )
    return vectors, beside


def _identity(urls: Sequence[str]) -> dict[str, Any]:
    """Return the number of files, their total size and a digest; the result does not depend on the files' location."""
    with ThreadPoolExecutor() as pool:
        known = list(pool.map(lines.identify, urls))
    digest = storage.sha256(json.dumps([sha256 for _, sha256 in known]).encode())
    return {"file": f"{len(urls)} file(s)", "bytes": sum(size for size, _ in known), "sha256": digest}


def _import(
    out: str,
    sides: Sequence[Side],
    stated: Mapping[str, Any],
    options: ArrayOptions,
    beam_options: Sequence[str],
    say: Progress,
) -> None:
    """Build the tables at OUT and publish them, with the data set last. Raises InputError, StorageError."""
    if is_published(join(out, "queries")) and not options.overwrite:
        raise InputError(f"{out}: contains hard negatives that were mined from different input. {_REMEDY}")
    for side in sides:
        has = [f"{role}s" for role in (KEY, TEXT) if side.keyed.has(role)] or ["row numbers as keys"]
        has = [f"the rows of {side.existing.url}"] if side.existing else has
        shape = f"{side.vectors.rows:,} × {side.vectors.dimension} {side.vectors.files[0].dtype}"
        say(f"{side.vectors.source}: {shape}, {' and '.join(has)}")

    def make(job: Job) -> Manifest:
        plan = ImportPlan(job.build.url, sides, options.metric == "cosine", job.watch.meter)
        columns = (
            _ids_by_shard(sides) if sides[0].existing else _pairs_by_shard(sides, _read_pairs(sides, options, say))
        )
        shards = FileExchange(join(job.watch.staging, "columns")).send(columns)
        summary = job.run_step(_STEP, sum(side.vectors.rows for side in sides), shards, import_rows, plan)
        for name in ("data", sides[1].embeddings):
            unpublish(join(out, name))
        for name in ("queries", "data", "embeddings"):
            storage.remove(join(out, name), recursive=True)
        return _publish(job.build, sides, summary, stated)

    urls = [file.url for side in sides for file in side.vectors.files]
    needs = {"vectors": sum(side.vectors.rows * side.vector_bytes for side in sides)}
    make_table(out, "mined", lambda: None, make, beam_options, say, needs=needs, urls=urls, reads=urls[:1])


def _read_pairs(sides: Sequence[Side], options: ArrayOptions, say: Progress) -> dict[str, Ragged]:
    """Read the columns of each query: its positives, none without `positives`, and filter pairs with `same_key`.

    Raises InputError for repeated keys, too.
    """
    queries, documents = (KeyLookup.of(side.keyed) for side in sides)
    pairs = Ragged.empty(sides[0].vectors.rows)
    if options.positives is not None:
        pairs = read_positives(options.positives, queries, documents, say)
    if options.same_key != "filter":
        return {"label_ids": pairs}
    keys = (rows.column(KEY) for rows in queries.files.read(0, pairs.rows, 1 << 16, {KEY}))
    own = np.concatenate([documents.find(some) for some in keys])
    is_filter = (own >= 0) & ~pairs.contains(own[:, None])[:, 0]
    say(f"{int(is_filter.sum()):,} queries have the key of a document, which is never their negative")
    return {"label_ids": pairs, "filter_label_ids": Ragged.from_counts(own[is_filter], is_filter.astype(np.int64))}


def _ids_by_shard(sides: Sequence[Side]) -> Iterator[tuple[tuple[int, int], pa.RecordBatch]]:
    """Yield ((side, shard), column) with the ids of the existing tables."""
    for number, side in enumerate(sides):
        assert side.existing is not None
        for shard in range(len(side.bounds)):
            name = side.existing.id_column
            ids = pa.concat_tables(side.existing.batches_of(shard, [name])).column(name).combine_chunks()
            yield (number, shard), pa.record_batch([ids], [name])


def _pairs_by_shard(
    sides: Sequence[Side], pairs: Mapping[str, Ragged]
) -> Iterator[tuple[tuple[int, int], pa.RecordBatch]]:
    """Yield ((side, shard), columns): each query's pairs, or how often each document is a positive."""
    labels = sides[1]
    kind = arrow.label_type(labels.label_count)
    for shard, (start, stop) in enumerate(sides[0].bounds):
        columns = {name: list_array(*rows.slice(start, stop), kind) for name, rows in pairs.items()}
        yield (0, shard), pa.record_batch(columns)
    frequency = np.bincount(pairs["label_ids"].entries, minlength=labels.label_count)
    for shard, (start, stop) in enumerate(labels.bounds):
        yield (1, shard), pa.record_batch([pa.array(frequency[start:stop], pa.int64())], ["frequency"])


def import_rows(element: tuple[tuple[int, int], Packet], plan: ImportPlan) -> Summary:
    """Write a shard of vectors, and of new rows. Raises InputError naming the file and row; StorageError."""
    (number, shard), packet = element
    plan.meter.start(_STEP)
    side = plan.sides[number]
    (start, stop), cut = side.bounds[shard], (shard, len(side.bounds))
    (more,) = receive([packet])
    group_rows = side.existing.manifest.group_rows(shard) if side.existing else side.group_rows
    done = 0
    with contextlib.ExitStack() as opened:
        files = {
            table: opened.enter_context(writing_shard(join(plan.url, table), *cut, schema, group_rows))
            for table, schema in side.written.items()
        }
        for columns in side.read(start, stop, plan.cosine):
            count = len(columns[KEY])
            columns |= dict(zip(more.schema.names, more.slice(done, count).columns, strict=True))
            for table, schema in side.written.items():
                files[table].write(pa.table([columns[name] for name in schema.names], schema=schema))
            done += count
            plan.meter.count(_STEP, count)
    plan.meter.count(_STEP, 0, sum(file.entry.bytes for file in files.values()))
    entries: dict[str, tuple[Shard, ...]] = {table: (file.entry,) for table, file in files.items()}
    mentions = {} if side.existing or side.name == "labels" else {"labels": len(more.column(0).flatten())}
    return Summary(entries, {side.table: Counter(rows_out=done, **mentions)})


def _publish(build: Build, sides: Sequence[Side], summary: Summary, stated: Mapping[str, Any]) -> Manifest:
    def put(side: Side, kind: str, path: str, parents: dict[str, str], **parameters: Any) -> Manifest:
        like = side.existing.manifest if side.existing else None
        group_rows, ids = (like.row_group_rows, like.id_range) if like else (side.group_rows, (0, side.vectors.rows))
        manifest = describe(Request(kind, parents, parameters), summary, side.written[path], group_rows, ids, path)
        return Build(join(build.out, path), join(build.url, path), build.claim).publish(manifest)

    digests = {}
    for side, kind in zip(sides, ("embeddings", "vectors"), strict=True):
        if side.existing:
            digest, more = side.existing.digest, {"arrays": dict(stated)}
        else:
            digest, more = put(side, side.name, side.table, {}, training_points=sides[0].vectors.rows).digest, {}
        vectors = put(side, kind, side.embeddings, {side.name: digest}, what=side.name, **more)
        digests[side.table.removeprefix("data/")] = digest
    if sides[0].existing:
        return vectors
    manifest = Manifest(kind="data", parents=digests, parameters={"options": {}, "arrays": dict(stated)})
    return Build(join(build.out, "data"), join(build.url, "data"), build.claim).publish(manifest)
