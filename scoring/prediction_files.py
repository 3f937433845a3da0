"""Predictions to files: rows of texts or of a split in, JSON lines, CSV, Parquet, TREC or a matrix out."""

import contextlib
import csv
import functools
import itertools
import json
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.formats.base import InvalidRecord, open_text
from pipelines.formats.from_columns import FORMULA, NO_SEPARATOR, is_csv, open_csv
from pipelines.formats.from_lines import split_cell
from pipelines.formats.keyed import INPUT, Texts
from schemas import PAD, arrow, storage
from schemas.arrow import DENSE, TITLES
from schemas.errors import InputError, missing_extra, option
from schemas.layout import DataLayout
from schemas.ragged import Ragged, offsets_of
from schemas.shard_files.parquet import filters_of, list_array, list_column
from schemas.table import Table
from scoring.decision import BEST, Decision
from scoring.exported import Answer, Exported
from scoring.predict import TextTokenizer, open_embedder
from trainer.inputs import Inputs, open_queries, require_inputs, with_titles

KNOWN_TOKENS = "known_tokens"
_SPREADSHEET = "utf-8-sig"  # encoding of a CSV that spreadsheets open as it is
_LISTS = {"labels": pa.string(), "scores": pa.float32(), "label_ids": pa.int64(), "texts": pa.string()}
_COLUMNS = {"key": pa.string(), **{name: pa.list_(kind) for name, kind in _LISTS.items()}}
# If calibrated, from texts, and by a decision.
_EXTRA_COLUMNS = {"probabilities": pa.list_(pa.float32()), KNOWN_TOKENS: pa.int32()}
_EXTRA_COLUMNS |= {"decision": pa.string(), "none_of_these": pa.bool_()}
_SCHEMA = arrow.without_nulls(_COLUMNS)

Write = Callable[[pa.Table], None]  # writes one batch of predictions, made by `prediction_table`


@dataclass(frozen=True)
class Layout:
    """How predictions are written. `separator`, `encoding`: of a CSV, as in the input.

    wide: the columns of the input come first, instead of the key; a CSV then has one row a text, and columns for
    `labels` labels (None: as many as a text has) with their `texts`, if these are not their keys.
    """

    wide: bool = False
    labels: int | None = None
    texts: bool = False
    separator: str = ","
    encoding: str = "utf-8"

    @classmethod
    def of(cls, texts: Texts, wide: bool, is_spreadsheet: bool) -> "Layout":
        """Return the layout of predictions for `texts`: like that of the first CSV. Raises InputError, StorageError."""
        for url in texts.places():
            if is_csv(url):
                mark = open_csv(url, texts.encoding).dialect.delimiter
                separator = "," if mark == NO_SEPARATOR else mark
                return cls(wide, separator=separator, encoding=open_text(url, texts.encoding)[0])
        return cls(wide, encoding=_SPREADSHEET if is_spreadsheet else cls.encoding)

    @contextlib.contextmanager
    def encodes(self) -> Iterator[None]:
        """Raise InputError for a character that the encoding lacks."""
        try:
            yield
        except UnicodeEncodeError as error:
            lacking = f"{error.object[error.start]!r} cannot be written in {self.encoding}, the encoding of INPUT"
            raise InputError(f"OUT: {lacking}. Give INPUT in UTF-8, or write .jsonl or .parquet.") from None


def write_predictions(
    exported: Exported,
    rows: Iterator[pa.Table],
    out: str,
    *,
    decision: Decision,
    to: str | None,
    layout: Layout,
    filter: bool,
    on_rows: Callable[[int], None],
    allowed_by: str | None = None,
) -> dict[str, Any]:
    """Write the labels that `decision` gives to every row, except labels in the row's filter pairs.

    `to`: format of the file; None: depends on the name. `allowed_by`: column of the input with the only labels that a
    row may have. `on_rows` gets the number of rows that are done. Raises ExtremisError.
    """
    labels = exported.label_table(("key", "text"))
    keys, texts = (labels[name].to_pylist() for name in ("key", "text"))
    named = any(text and text != key for key, text in zip(keys, texts, strict=True))
    layout = replace(layout, labels=decision.max_labels, texts=named)
    done = predictions = without = none = 0
    began = time.perf_counter()
    first = [*itertools.islice(rows, 1)]
    extra = {"decision", *({"probabilities", "none_of_these"} if exported.calibration is not None else ())}
    extra |= {name for table in first for name in table.column_names}
    more = {name: kind for name, kind in _EXTRA_COLUMNS.items() if name in extra}
    schema = arrow.without_nulls({**_COLUMNS, **more})
    with open_writer(out, to, len(labels), layout, schema) as write:
        for table in itertools.chain(first, rows):
            known = table[KNOWN_TOKENS].to_numpy() if KNOWN_TOKENS in table.column_names else None
            inputs = Inputs.of(table, exported.serving.columns)
            filters = filters_of(table) if filter else None
            allowed = None if allowed_by is None else _allowed(exported, table, allowed_by)
            answer = exported.decide(inputs, decision, filters, allowed, known)
            table = table if layout.wide or allowed is None else table.drop_columns([INPUT])
            write(prediction_table(table, answer, labels, schema, decision.name))
            done += table.num_rows
            given = (answer.ids != PAD).sum(axis=1)
            predictions, without = predictions + int(given.sum()), without + int((given == 0).sum())
            none += 0 if answer.none_of_these is None else int(answer.none_of_these.sum())
            on_rows(done)
    counts = {"queries": done, "predictions": predictions, "without_labels": without, "none_of_these": none}
    facts = {"out": out, "export": exported.table.url, "decision": decision.name}
    return {**facts, **counts, "seconds": round(time.perf_counter() - began, 3)}


def _allowed(exported: Exported, table: pa.Table, name: str) -> Ragged:
    """Return the ids of the labels in the column `name` of the input, as labels stand in DATA. Raises InputError."""
    ids = list[list[int]]()
    for key, row in zip(table["key"].to_pylist(), _given(table[INPUT]), strict=True):
        where = f"{option('allowed_by', name)}: the row {key!r:.80}"
        if name not in row:
            raise InputError(f"{where} has no such column; its columns are {', '.join(row)}.")
        try:
            keys = split_cell(row[name], name) if isinstance(row[name], str) else [*map(str, row[name] or ())]
            ids.append(exported.ids_of(keys))
        except (InvalidRecord, InputError) as error:
            raise InputError(f"{where}: {error}") from None
    return Ragged.from_lists(ids)


def rows_of_texts(exported: Exported, texts: Texts, batch: int, embedder: str | None = None) -> Iterator[pa.Table]:
    """Return texts with the columns that the encoder reads, `batch` rows at a time. Raises ExtremisError.

    `embedder`: a different path or hub name of the model that computed the dense vectors of DATA. The call also warms
    up the model.
    """
    columns = exported.serving.columns
    features, embed = "feature_ids" in columns, open_embedder(exported, embedder)
    vector_dimension = 0 if embed or DENSE not in columns else exported.table.parameters[DENSE]
    tokenizer = TextTokenizer(exported) if "input_ids" in columns or embed else None

    def with_columns(rows: pa.RecordBatch) -> pa.Table:
        table = pa.Table.from_batches([rows])
        if tokenizer is not None:
            inputs, known = tokenizer.encode(rows["text"].to_pylist())
            assert inputs.tokens is not None
            ids = list_array(inputs.tokens.values, inputs.tokens.offsets, pa.uint32())
            table = table.append_column("input_ids", ids)
            table = table.append_column(TITLES, pa.array(inputs.titles))
            if not (features or vector_dimension):  # a row may have only features or vectors
                table = table.append_column(KNOWN_TOKENS, pa.array(known, pa.int32()))
        return table if embed is None else table.append_column(DENSE, embed(rows["text"]))

    if not (features or vector_dimension):
        a_text = with_columns(pa.record_batch({"text": pa.array(["a text"])}))
        exported.decide(Inputs.of(a_text, columns), BEST)
    return map(with_columns, texts.batches(batch, features, vector_dimension))


def rows_of_split(exported: Exported, data: str, split: str) -> tuple[Iterator[pa.Table], int]:
    """Return an iterator over the row groups of a split of the run's DATA, and the number of rows.

    Batches and filters are the same as in `extremis evaluate`, so the predictions are also the same. Raises InputError,
    TableError, StorageError.
    """
    digest, trained = Table.open(data, "data").digest, exported.table.parents["data"]
    if digest != trained:
        raise InputError(
            f"{exported.table.url}: this export comes from a run on data with digest {trained[:12]}…, but {data} has "
            f"digest {digest[:12]}…. Give the DATA of that run, or give the texts as INPUT."
        )
    queries = open_queries(DataLayout(data), split)
    require_inputs(queries, exported.serving.inputs)
    columns = ["key", *with_titles(queries, exported.serving.columns), *({"filter_label_ids"} & {*queries.columns})]
    return queries.batches(columns), queries.rows


@contextlib.contextmanager
def open_writer(
    out: str, form: str | None, labels: int, layout: Layout = Layout(), schema: pa.Schema = _SCHEMA
) -> Iterator[Write]:
    """Open a writer for predictions among `labels` labels; publish the file at `out` when the block ends without error.

    `schema`: the schema of the predictions. Raises StorageError, and InputError if neither `form` nor the name
    specifies the format, or if it does not fit `out` or `layout`.
    """
    form = form or next((form for end, form in _FORMS_BY_ENDING.items() if out.endswith(end)), None)
    if form is None:
        raise InputError(
            f"{out}: unknown file ending (expected {', '.join(_FORMS_BY_ENDING)}). Give {option('to', 'FORM')}."
        )
    if layout.wide and form not in _WIDE:
        raise InputError(
            f"{option('wide', True)} works only with {', '.join(_WIDE)}, but OUT is {form}. Give {option('to', 'csv')}."
        )
    with storage.writing(out) as path, _FORMS[form](path, labels, schema, layout) as write:
        yield write


def prediction_table(
    rows: pa.Table, answer: Answer, labels: pa.Table, schema: pa.Schema = _SCHEMA, decision: str = ""
) -> pa.Table:
    """Build a table with one row for each of `rows` [B]: key, label keys, scores, label ids and label texts.

    Padding is removed. `labels` [L]: key, text. If `schema` has the columns, probabilities, known tokens, the name of
    the decision and none_of_these are added, and always INPUT, if `rows` have it.
    """
    present = answer.ids != PAD
    offsets = pa.array(offsets_of(present.sum(axis=1)).astype(np.int32))
    flat = pa.array(answer.ids[present])
    named, texts = (labels[name].combine_chunks().take(flat).cast(pa.string()) for name in ("key", "text"))
    lists = {"labels": named, "scores": pa.array(answer.scores[present], pa.float32()), "label_ids": flat}
    lists["texts"] = texts.fill_null("")
    if answer.probabilities is not None:
        lists["probabilities"] = pa.array(answer.probabilities[present], pa.float32())
    arrays = {name: pa.ListArray.from_arrays(offsets, column) for name, column in lists.items()}
    arrays |= {"decision": pa.array([decision] * len(present), pa.string()), "none_of_these": answer.none_of_these}
    table = pa.table([arrays[name] if name in arrays else rows[name] for name in schema.names], schema=schema)
    return table.append_column(INPUT, rows[INPUT]) if INPUT in rows.column_names else table


# The columns of the input.


def _given(column: pa.ChunkedArray) -> list[dict[str, Any]]:
    """Return the rows of the input."""
    return column.to_pylist() if pa.types.is_struct(column.type) else [json.loads(line) for line in column.to_pylist()]


def _free(name: str, taken: Collection[str]) -> str:
    """Return the name of an added column: with predicted_ before it, if the input has a column of this name."""
    return _free(f"predicted_{name}", taken) if name in taken else name


class _Input:
    """The columns of the input in each batch of predictions; later batches have no others than the first one."""

    names: list[str] = []
    kind: pa.DataType | None = None

    def rows(self, table: pa.Table) -> list[dict[str, Any]]:
        """Return the rows of the input. Raises InputError if they have other columns than those of the first batch."""
        rows = _given(table[INPUT])
        found = [*dict.fromkeys(name for row in rows for name in row)]
        self.names = self.names or found
        if more := {*found} - {*self.names}:
            raise self._differ(f"{', '.join(sorted(more))} beside {', '.join(self.names)}")
        return rows

    def columns(self, table: pa.Table) -> list[pa.Array]:
        """Return the columns of the input, of the types in the first batch. Raises InputError if other types come."""
        rows, column = self.rows(table), table[INPUT].combine_chunks()
        try:
            known = column.type in (self.kind, None) or (self.kind is None and pa.types.is_struct(column.type))
            given = column if known else pa.array(rows, self.kind)
        except (pa.ArrowException, TypeError) as error:
            raise self._differ(str(error)) from None
        self.kind = given.type
        return given.flatten()

    def _differ(self, how: str) -> InputError:
        return InputError(
            f"INPUT: later rows have other columns than the first ones: {' '.join(how.split())[:200]}. Write .jsonl, "
            "or give files with the same columns."
        )


@contextlib.contextmanager
def _write_json(path: str, labels: int, schema: pa.Schema, layout: Layout) -> Iterator[Write]:
    taken = set[str]()

    def write(table: pa.Table) -> None:
        given = _given(table[INPUT]) if layout.wide else []
        taken.update(() if taken else (name for row in given for name in row))
        for place, query in enumerate(table.select(schema.names).to_pylist()):
            for name in {"scores", "probabilities"} & query.keys():
                query[name] = [float(f"{number:.7g}") for number in query[name]]
            if layout.wide:
                row, _ = given[place], query.pop("key")
                query = row | {_free(name, taken | row.keys()): value for name, value in query.items()}
            file.write(json.dumps(query, ensure_ascii=False, default=str) + "\n")

    with open(path, "w", encoding="utf-8") as file:
        yield write


@contextlib.contextmanager
def _write_trec(path: str, labels: int, schema: pa.Schema, layout: Layout) -> Iterator[Write]:
    """Write lines `query Q0 label rank score tag` for trec_eval and pytrec_eval."""
    seen = set[str]()

    def write(table: pa.Table) -> None:
        for key, *ranking in zip(*(table[name].to_pylist() for name in ("key", "labels", "scores")), strict=True):
            if key in seen:
                raise InputError(
                    f"a TREC run names each query once, but the key {key!r} belongs to two rows. Give each row a "
                    "unique key, or write .jsonl, .parquet or .npz instead."
                )
            seen.add(key)
            for rank, (label, score) in enumerate(zip(*ranking, strict=True), 1):
                if len(key.split()) != 1 or len(label.split()) != 1:
                    raise InputError(
                        f"fields of a TREC run are separated by spaces, but the key {key!r} or {label!r} contains a "
                        "space. Write .jsonl, .parquet or .npz instead."
                    )
                file.write(f"{key} Q0 {label} {rank} {score:.9g} extremis\n")

    with open(path, "w", encoding="utf-8") as file:
        yield write


def plain_cell(value: Any) -> str:
    """Return a value as a cell of a CSV; texts that a spreadsheet takes for formulas get an apostrophe before them.

    `read_csv` takes the apostrophe away. Numbers and dates are as in JSON, and lists and records are JSON.
    """
    if isinstance(value, str):
        return f"'{value}" if value[:1] in _FIRST and FORMULA.match(f"'{value}") else value
    if value is None:
        return ""
    plain = json.dumps(value, ensure_ascii=False, default=str)
    return plain.strip('"')


_FIRST = "'=+-@\t\r\n"  # first characters of formulas, and of texts that look like formulas with an apostrophe


@contextlib.contextmanager
def _write_csv(path: str, labels: int, schema: pa.Schema, layout: Layout) -> Iterator[Write]:
    """Write one row per label, and one for a text without labels; or, `wide`, one per text."""
    of_label = {"label": "labels", "text": "texts", "score": "scores", "probability": "probabilities"}
    if layout.wide:  # a probability says more than a score
        measure = "probability" if "probabilities" in schema.names else "score"
        named = {"label_text": "texts"} if layout.texts else {}
        of_label = {"label": "labels", **named, measure: of_label[measure]}
    of_label = {name: column for name, column in of_label.items() if column in schema.names}
    ends = [name for name in ("decision", "none_of_these") if name in schema.names]
    given, held = _Input(), list[pa.Table]()

    def cells_of(query: dict[str, Any]) -> list[list[str]]:
        """Return the cells of each label of a text."""
        values = zip(*(query[column] for column in of_label.values()), strict=True)
        return [[plain_cell(each) if isinstance(each, str) else f"{each:.7g}" for each in row] for row in values]

    def write_long(table: pa.Table) -> None:
        for query in table.to_pylist():
            key, end = plain_cell(query["key"]), [plain_cell(query[name]) for name in ends]
            found = cells_of(query)
            writer.writerows([key, rank, *cells, *end] for rank, cells in enumerate(found, 1))
            if not found:
                writer.writerow([key, "", *[""] * len(of_label), *end])

    def write_wide(table: pa.Table, most: int) -> None:
        rows = given.rows(table)
        if not file.tell():
            added = [*(f"{name}_{rank}" for rank in range(1, most + 1) for name in of_label), *ends]
            writer.writerow(map(plain_cell, [*given.names, *(_free(name, given.names) for name in added)]))
        for row, query in zip(rows, table.select([*of_label.values(), *ends]).to_pylist(), strict=True):
            cells = [cell for of in cells_of(query) for cell in of]
            cells += [""] * (most * len(of_label) - len(cells))
            kept = [plain_cell(row.get(name)) for name in given.names]
            writer.writerow([*kept, *cells, *(plain_cell(query[name]) for name in ends)])

    with layout.encodes(), open(path, "w", encoding=layout.encoding, newline="") as file:
        writer = csv.writer(file, delimiter=layout.separator)
        if not layout.wide:
            writer.writerow(["key", "rank", *of_label, *ends])
            yield write_long
        elif layout.labels is not None:
            yield functools.partial(write_wide, most=layout.labels)
        else:  # the longest row says how many columns there are
            yield held.append
            most = max((pc.max(pc.list_value_length(table["labels"])).as_py() or 0 for table in held), default=0)
            for table in held:
                write_wide(table, most)


@contextlib.contextmanager
def _write_parquet(path: str, labels: int, schema: pa.Schema, layout: Layout) -> Iterator[Write]:
    with contextlib.ExitStack() as stack:
        given, writers = _Input(), list[pq.ParquetWriter]()

        def write(table: pa.Table) -> None:
            if layout.wide:
                own = [name for name in schema.names if name != "key"]
                columns = [*given.columns(table), *table.select(own).columns]
                table = pa.table(columns, [*given.names, *(_free(name, given.names) for name in own)])
            if not writers:
                writers.append(stack.enter_context(pq.ParquetWriter(path, table.schema, compression="zstd")))
            writers[0].write_table(table)

        yield write
        if not writers:
            write(schema.empty_table())


@contextlib.contextmanager
def _write_matrix(path: str, labels: int, schema: pa.Schema, layout: Layout) -> Iterator[Write]:
    """Write a file for `scipy.sparse.load_npz`: CSR [N, L] float32, made in memory. Row n is the n-th query."""
    try:
        from scipy import sparse
    except ImportError:
        raise missing_extra("a matrix .npz needs SciPy", "trainer") from None
    batches = [sparse.csr_array((0, labels), dtype=np.float32)]

    def write(table: pa.Table) -> None:
        ids, offsets = list_column(table, "label_ids")
        values = list_column(table, "scores").values, ids, offsets
        batches.append(sparse.csr_array(values, shape=(table.num_rows, labels)))

    yield write
    matrix = sparse.csr_matrix(sparse.vstack(batches, format="csr"))
    matrix.sort_indices()
    # The narrowest index type, independent of the types of the parts.
    kind = sparse.get_index_dtype(maxval=max(labels, matrix.nnz))
    matrix.indices, matrix.indptr = matrix.indices.astype(kind), matrix.indptr.astype(kind)
    with open(path, "wb") as file:
        sparse.save_npz(file, matrix, compressed=False)


_FORMS: dict[str, Callable[[str, int, pa.Schema, Layout], contextlib.AbstractContextManager[Write]]] = {
    "jsonl": _write_json,
    "trec": _write_trec,
    "parquet": _write_parquet,
    "csv": _write_csv,
    "npz": _write_matrix,
}
_WIDE = ("csv", "jsonl", "parquet")
_FORMS_BY_ENDING = {**{f".{form}": form for form in _FORMS}, ".ndjson": "jsonl", ".run": "trec"}
