"""The table of labels of an evaluation: names, examples of errors, files, and a summary."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from extremis.inspecting import TextDecoder, text_columns
from schemas import storage
from schemas.errors import InputError, option
from schemas.layout import DataLayout
from schemas.owners import require_output_file
from schemas.table import Table
from scoring.options import EvaluateOptions
from scoring.prediction_files import plain_cell

LONGEST_EXAMPLE = 160  # characters of an example
WEAKEST = 20
_ENDINGS = (".csv", ".parquet")
_LISTS = ("missed_for", "given_for")
_EXAMPLES = ("missed", "wrong")
_FORMULA = r"\A['=+\-@\t\r\n]"  # the start of a text that a spreadsheet would compute


def path_beside(evaluation: str) -> str:
    """Return the path of the table of labels beside the record of an `evaluation`."""
    return f"{evaluation.removesuffix('.json')}-labels.parquet"


def require_labels_file(options: EvaluateOptions, reads: Sequence[str]) -> None:
    """Raise InputError if the table of labels cannot be written where `options` say."""
    out = str(options.labels)
    if not out.endswith(_ENDINGS):
        raise InputError(f"{option('labels', out)}: expected a name that ends in {' or '.join(_ENDINGS)}.")
    remedy = f"Give {option('overwrite', True)} to replace it, or another {option('labels')}."
    require_output_file(out, reads, remedy, options.overwrite)


def read_names(data: DataLayout) -> pa.Table:
    """Return the key and the text of each label of DATA, [L]. Raises TableError."""
    strings = pa.schema([("key", pa.string()), ("text", pa.string())])
    return pa.concat_tables(group.cast(strings) for group in Table.open(data.labels, "labels").batches(strings.names))


def name_figures(
    figures: dict[str, pa.Array], data: DataLayout, queries: Table, ids: np.ndarray, points: np.ndarray
) -> pa.Table:
    """Name the labels of `figures`, as of `LabelSets.of_labels`, and add the texts of the queries with errors.

    `ids` [N]: the ids of the evaluated queries in the table `queries`; `points` [L]: training points of each label.
    Raises TableError.
    """
    names = read_names(data)
    keys, texts = names["key"].combine_chunks(), pc.fill_null(names["text"].combine_chunks(), "")
    columns = {"label": keys, "text": texts, "training_points": pa.array(points)}
    for name, column in figures.items():
        if name in _LISTS:
            columns[name] = pa.ListArray.from_arrays(column.offsets, keys.take(column.values))
            columns[f"{name}_texts"] = pa.ListArray.from_arrays(column.offsets, texts.take(column.values))
        elif name not in _EXAMPLES:
            columns[name] = column
    of_errors = [pa.array(ids).take(figures[name]) for name in _EXAMPLES]
    rows = np.unique(pa.chunked_array(of_errors).drop_null().to_numpy())
    examples = queries.rows_at(rows, ["key", *text_columns(queries)])
    if "input_ids" in examples.column_names:  # a token has a character or more
        first = pc.list_slice(examples["input_ids"], 0, LONGEST_EXAMPLE)
        examples = examples.drop_columns("input_ids").append_column("input_ids", first)
    shown = {
        "": examples["key"].cast(pa.string()),
        "_text": pa.array(TextDecoder(data).texts(examples, LONGEST_EXAMPLE)),
    }
    for name, column in zip(_EXAMPLES, of_errors, strict=True):
        places = pc.index_in(column, pa.array(rows), skip_nulls=True)
        columns |= {f"{name}_query{ending}": of.take(places) for ending, of in shown.items()}
    return pa.table(columns)


def write_labels(table: pa.Table, out: str) -> None:
    """Write a table of labels as CSV or Parquet. Raises StorageError.

    In CSV, lists are joined by " | ", and a text that a spreadsheet takes for a formula gets an apostrophe before it.
    """
    with storage.writing(out) as path:
        if out.endswith(".parquet"):
            pq.write_table(table, path, compression="zstd")
            return
        columns = {name: _cells(table[name].combine_chunks()) for name in table.column_names}
        pa.csv.write_csv(pa.table(columns), path)


def _cells(column: pa.Array) -> pa.Array:
    """Return a column as it is in CSV."""
    if pa.types.is_floating(column.type):
        return pc.round(column, 4)
    if pa.types.is_list(column.type):
        column = pc.binary_join(column.cast(pa.list_(pa.string())), " | ")
    if not pa.types.is_string(column.type) or not pc.any(pc.match_substring_regex(column, _FORMULA)).as_py():
        return column
    return pa.array([text and plain_cell(text) for text in column.to_pylist()], pa.string())


def summarize_labels(table: pa.Table, depth: int) -> dict[str, Any]:
    """Return numbers of labels, and the labels with the lowest recall, those with the most positives first.

    `never_found`: labels with positives, none of which is given; `never_given`: those of them that are given to no
    query at all. `depth`: number of ranks in which positives were looked for.
    """
    support, found, predicted = (table[name].to_numpy() for name in ("support", "found", "predicted"))
    missed = np.flatnonzero(found < support)
    weakest = missed[np.lexsort((-support[missed], found[missed] / support[missed]))][:WEAKEST]
    rows = table.take(pa.array(weakest)).to_pylist()
    for row in rows:  # JSON has no infinity
        row["median_rank"] = row["median_rank"] if row["median_rank"] <= depth else None
    return {
        "labels": len(support),
        "with_positives": int((support > 0).sum()),
        "never_found": int(((support > 0) & (found == 0)).sum()),
        "never_given": int(((support > 0) & (predicted == 0)).sum()),
        "depth": depth,
        "weakest": rows,
    }
