"""Counts of DATA that `shard`, `inspect` and reports print: points, labels, empty and repeated texts."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.shard_files.parquet import list_column
from schemas.shares import ALL_ROWS
from schemas.storage import join
from schemas.table import Table

_COMPARED_ROWS = 2_000_000  # limit for the rows of all splits; above it, texts are not compared


def summarize(data: str) -> dict[str, Any]:
    """Return {"splits": {name: counts}, "labels": counts, "rejected": {table: {reason: count}}} of the DATA at `data`.

    Counts of a split: points, merged, labels (mentions) and empty_texts. Small splits other than train also have
    in_train, the number of points with a text that is also in train. Raises TableError, StorageError.
    """
    manifest = Table.open(data, "data").manifest
    tables = {name: Table.open(join(data, name)) for name in manifest.parents if name != "tokenizer"}
    splits = {name: tables[f"queries/{name}"] for name in splits_of(DataLayout(data))}
    is_small = sum(table.rows for table in splits.values()) <= _COMPARED_ROWS
    texts = {name: texts_of(table) for name, table in splits.items()} if is_small else {}
    counts = {}
    for name, split in splits.items():
        counters = split.manifest.counters
        written = counters.get("rows_out", split.rows)  # a version may have lost rows: an approximate count
        counts[name] = {
            "points": split.rows,
            "merged": counters.get("rows_merged", 0),
            "labels": round(counters.get("labels", 0) * split.rows / max(1, written)),
            "empty_texts": counters.get("empty_texts", 0),
        }
        if name != "train" and len(texts.get(name, ())):
            counts[name]["in_train"] = repeated(texts[name], texts["train"]).true_count
    labels, sizes = tables["labels"], Counter[str]()
    for kind, files in manifest.parameters.get("input", {}).items():
        sizes[kind.partition("/")[0]] += files["bytes"]
    # Labels that are made from the files of all points are not merged: many points name one label.
    derived = sizes["labels"] == sum(sizes[name] for name in splits)
    own = {name: table for name, table in tables.items() if not name.startswith("parts/")}  # a version repeats these
    rejected = {name: table.manifest.counters.get("rejected") for name, table in own.items()}
    for name, share in (("queries/val", "validation_share"), ("queries/test", "test_share")):
        if manifest.parameters["options"].get(share):  # the split was taken from train, and shares its rejects
            rejected.pop(name, None)
    return {
        "splits": counts,
        "labels": {
            "labels": labels.rows,
            "merged": 0 if derived else labels.manifest.counters.get("rows_merged", 0),
            "without_training_points": labels.manifest.counters.get("without_training_points", 0),
            "without_text": labels.manifest.counters.get("empty_texts", 0),
        },
        "rejected": {name: reasons for name, reasons in rejected.items() if reasons},
    }


_COUNT_TEXTS = {
    "merged": "rows merged into another row with the same text",
    "empty_texts": "with an empty text (kept)",
    "in_train": "with a text that is also in train (same tokens): evaluate measures these apart",
    "without_training_points": "without a training point",
    "without_text": "without a text",
}


def summary_lines(data: str, summary: Mapping[str, Any]) -> list[str]:
    """Format the summary of the DATA at `data`: one line per table, starting with the labels."""

    def line(name: str, first: str, counts: Mapping[str, int]) -> str:
        more = [f"{counts[key]:,} {said}" for key, said in _COUNT_TEXTS.items() if counts.get(key)]
        return f"{name}: {', '.join([first, *more])}"

    lines = [line("labels", f"{summary['labels']['labels']:,}", summary["labels"])]
    for name, counts in summary["splits"].items():
        each = counts["labels"] / max(1, counts["points"])
        lines.append(line(name, f"{counts['points']:,} points, {each:.1f} labels each", counts))
    for name, reasons in summary["rejected"].items():
        rejected = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        lines.append(f"rejected from {name.removeprefix('queries/')}: {rejected}; see {DataLayout(data).rejects}")
    return lines


def seen_queries(data: str, split: str) -> np.ndarray | None:
    """Return which queries of a split have a text that is also in train, bool [N]; None if texts are not compared.

    Texts are not compared if there are more than _COMPARED_ROWS rows. Raises TableError, StorageError.
    """
    layout, parents = DataLayout(data), Table.open(data, "data").parents
    if split == "train" or not {f"queries/{split}", "queries/train"} <= parents.keys():
        return None
    tables = {name: Table.open(layout.queries(name), "queries") for name in (split, "train")}
    if sum(table.rows for table in tables.values()) > _COMPARED_ROWS:
        return None
    own, among = map(texts_of, tables.values())
    return repeated(own, among).to_numpy(zero_copy_only=False) if len(own) else None


def repeated(texts: pa.Array, among: pa.Array) -> pa.Array:
    """Return which `texts` are not empty and also occur in `among`."""
    import pyarrow.compute as pc  # takes 40 ms, and few who look at a run or an export need it

    return pc.and_(pc.greater(pc.binary_length(texts), 0), pc.is_in(texts, value_set=among))


def texts_of(table: Table, rows: int | None = None) -> pa.Array:
    """Return the token ids of `rows` rows, from all parts, as large binary [N]; empty if the table has no token ids."""
    parts = [pa.array([], pa.large_binary())]
    for group in ALL_ROWS.batches(table, ["input_ids"], rows) if "input_ids" in table.columns else ():
        tokens = list_column(group, "input_ids")
        buffers = [None, *map(pa.py_buffer, (tokens.offsets * tokens.entries.itemsize, tokens.entries))]
        parts.append(pa.Array.from_buffers(pa.large_binary(), tokens.rows, buffers))
    return pa.concat_arrays(parts)


def splits_of(data: DataLayout, only: str | None = None) -> list[str]:
    """List the splits of DATA, train first, or just `only`. Raises InputError if `only` does not exist; TableError."""
    parents = Table.open(data.root, "data").parents
    names = [name.removeprefix("queries/") for name in parents if name.startswith("queries/")]
    names.sort(key=lambda name: (name != "train", name))
    if only is not None and only not in names:
        raise InputError(f"{data.root}: no split {only!r}; known splits: {', '.join(names)}.")
    return names if only is None else [only]
