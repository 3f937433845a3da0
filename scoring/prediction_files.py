"""Predictions to files: rows of texts or of a split in, JSON lines, CSV, Parquet, TREC or a matrix out."""

import contextlib
import csv
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.formats.from_columns import FORMULA
from pipelines.formats.keyed import Texts
from schemas import PAD, arrow, storage
from schemas.arrow import DENSE, TITLES
from schemas.errors import InputError, missing_extra, option
from schemas.layout import DataLayout
from schemas.ragged import offsets_of
from schemas.shard_files.parquet import filters_of, list_array, list_column
from schemas.table import Table
from scoring.decision import BEST, Decision
from scoring.exported import Answer, Exported
from scoring.predict import TextTokenizer, open_embedder
from trainer.inputs import Inputs, open_queries, require_inputs, with_titles

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # first characters of cells that spreadsheets read as formulas
KNOWN_TOKENS = "known_tokens"
_LISTS = {"labels": pa.string(), "scores": pa.float32(), "label_ids": pa.int64(), "texts": pa.string()}
_COLUMNS = {"key": pa.string(), **{name: pa.list_(kind) for name, kind in _LISTS.items()}}
_EXTRA_COLUMNS = {"probabilities": pa.list_(pa.float32()), KNOWN_TOKENS: pa.int32()}  # if calibrated; if from texts
_SCHEMA = arrow.without_nulls(_COLUMNS)

Write = Callable[[pa.Table], None]  # writes one batch of predictions, made by `prediction_table`


def write_predictions(
    exported: Exported,
    rows: Iterator[pa.Table],
    out: str,
    *,
    decision: Decision,
    to: str | None,
    safe_cells: bool,
    filter: bool,
    on_rows: Callable[[int], None],
) -> dict[str, Any]:
    """Write the labels that `decision` gives to every row, except labels in the row's filter pairs.

    `to`: format of the file; None: depends on the name. `safe_cells`: no CSV cell starts like a formula.
    `on_rows` gets the number of rows that are done. Raises ExtremisError.
    """
    labels = exported.label_table(("key", "text"))
    done = predictions = 0
    began = time.perf_counter()
    first = [*itertools.islice(rows, 1)]
    extra = {"probabilities"} if exported.calibration is not None else set()
    extra |= {name for table in first for name in table.column_names}
    more = {name: kind for name, kind in _EXTRA_COLUMNS.items() if name in extra}
    schema = arrow.without_nulls({**_COLUMNS, **more})
    with open_writer(out, to, len(labels), safe_cells, schema) as write:
        for table in itertools.chain(first, rows):
            known = table[KNOWN_TOKENS].to_numpy() if KNOWN_TOKENS in table.column_names else None
            inputs = Inputs.of(table, exported.serving.columns)
            answer = exported.decide(inputs, decision, filters_of(table) if filter else None, known=known)
            write(prediction_table(table, answer, labels, schema))
            done += table.num_rows
            predictions += int((answer.ids != PAD).sum())
            on_rows(done)
    counts = {"queries": done, "predictions": predictions, "seconds": round(time.perf_counter() - began, 3)}
    return {"out": out, "export": exported.table.url, "decision": decision.name, **counts}


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
    out: str, form: str | None, labels: int, safe_cells: bool = False, schema: pa.Schema = _SCHEMA
) -> Iterator[Write]:
    """Open a writer for predictions among `labels` labels; publish the file at `out` when the block ends without error.

    `schema`: the schema of the predictions. `safe_cells`: no CSV cell starts like a formula. Raises StorageError, and
    InputError if neither `form` nor the name specifies the format, or if the format does not fit `out` or `safe_cells`.
    """
    form = form or next((form for end, form in _FORMS_BY_ENDING.items() if out.endswith(end)), None)
    if form is None:
        raise InputError(
            f"{out}: unknown file ending (expected {', '.join(_FORMS_BY_ENDING)}). Give {option('to', 'FORM')}."
        )
    if safe_cells and form != "csv":
        raise InputError(
            f"{option('safe_cells', True)} works only with CSV, but OUT is {form}. Give {option('to', 'csv')}."
        )
    make = functools.partial(_write_csv, safe_cells=True) if safe_cells else _FORMS[form]
    with storage.writing(out) as path, make(path, labels, schema) as write:
        yield write


def prediction_table(rows: pa.Table, answer: Answer, labels: pa.Table, schema: pa.Schema = _SCHEMA) -> pa.Table:
    """Build a table with one row for each of `rows` [B]: key, label keys, scores, label ids and label texts.

    Padding is removed. `labels` [L]: key, text. If `schema` has the columns, probabilities and known tokens are added.
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
    return pa.table([arrays[name] if name in arrays else rows[name] for name in schema.names], schema=schema)


@contextlib.contextmanager
def _write_lines(
    format_query: Callable[[dict[str, Any]], str], path: str, labels: int, schema: pa.Schema
) -> Iterator[Write]:
    with open(path, "w", encoding="utf-8") as file:
        yield lambda table: file.writelines(map(format_query, table.to_pylist()))


def _json_line(query: dict[str, Any]) -> str:
    for name in {"scores", "probabilities"} & query.keys():
        query[name] = [float(f"{number:.7g}") for number in query[name]]
    return json.dumps(query, ensure_ascii=False) + "\n"


def _trec_lines(seen: set[str], query: dict[str, Any]) -> str:
    """Format lines `query Q0 label rank score tag` for trec_eval and pytrec_eval; `seen`: keys of earlier queries."""
    key, lines = query["key"], ""
    if key in seen:
        raise InputError(
            f"a TREC run names each query once, but the key {key!r} belongs to two rows. Give each row a unique key, "
            "or write .jsonl, .parquet or .npz instead."
        )
    seen.add(key)
    for rank, (label, score) in enumerate(zip(query["labels"], query["scores"], strict=True), 1):
        if len(key.split()) != 1 or len(label.split()) != 1:
            raise InputError(
                f"fields of a TREC run are separated by spaces, but the key {key!r} or {label!r} contains a space. "
                "Write .jsonl, .parquet or .npz instead."
            )
        lines += f"{key} Q0 {label} {rank} {score:.9g} extremis\n"
    return lines


@contextlib.contextmanager
def _write_csv(path: str, labels: int, schema: pa.Schema, safe_cells: bool = False) -> Iterator[Write]:
    """Write one row per label; with `safe_cells`, an apostrophe goes before cells that start like a formula."""

    def safe(cell: str) -> str:
        return f"'{cell}" if safe_cells and cell.startswith(_FORMULA) else cell

    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        more = [name for name in ("probabilities",) if name in schema.names]
        writer.writerow(["key", "rank", "label", "text", "score", *(["probability"] if more else [])])

        def write(table: pa.Table) -> None:
            for query in table.to_pylist():
                columns = zip(*(query[name] for name in ("labels", "texts", "scores", *more)), strict=True)
                for rank, (label, text, *of) in enumerate(columns, 1):
                    writer.writerow([safe(query["key"]), rank, safe(label), safe(text), *(f"{n:.7g}" for n in of)])

        yield write


@contextlib.contextmanager
def _write_parquet(path: str, labels: int, schema: pa.Schema) -> Iterator[Write]:
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        yield writer.write_table


@contextlib.contextmanager
def _write_matrix(path: str, labels: int, schema: pa.Schema) -> Iterator[Write]:
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


_FORMS: dict[str, Callable[[str, int, pa.Schema], contextlib.AbstractContextManager[Write]]] = {
    "jsonl": functools.partial(_write_lines, _json_line),
    "trec": lambda *of_file: _write_lines(functools.partial(_trec_lines, set()), *of_file),
    "parquet": _write_parquet,
    "csv": _write_csv,
    "npz": _write_matrix,
}
_FORMS_BY_ENDING = {**{f".{form}": form for form in _FORMS}, ".ndjson": "jsonl", ".run": "trec"}


def plain_cell(text: str) -> str:
    """Return `text` as a cell of a CSV that a spreadsheet shows as text; `read_csv` takes the apostrophe away."""
    return f"'{text}" if FORMULA.match(f"'{text}") else text
