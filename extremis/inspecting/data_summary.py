"""Human-readable summary of a DATA: content, merged and rejected rows, and possible problems."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.layout import DataLayout
from schemas.manifest import Manifest
from schemas.shares import ALL_ROWS
from schemas.storage import join
from schemas.table import Table

_COMPARED_ROWS = 2_000_000  # limit for the rows of all splits; above it, texts are not compared
_TRAIN = "train"


def summarize(data: str) -> dict[str, Any]:
    """Return {"splits": {name: counts}, "labels": counts, "rejected": {table: {reason: count}}} of the DATA at `data`.

    Counts of a split: points, merged, labels (mentions) and empty_texts. Small splits other than train also have
    in_train, the number of points with a text that is also in train. Raises TableError, StorageError.
    """
    manifest = Table.open(data, "data").manifest
    tables = {name: Table.open(join(data, name)) for name in manifest.parents if name != "tokenizer"}
    by_split = {name.partition("/")[2]: table for name, table in tables.items() if name.startswith("queries/")}
    splits = {name: by_split[name] for name in sorted(by_split, key=lambda name: (name != _TRAIN, name))}
    is_small = sum(table.rows for table in splits.values()) <= _COMPARED_ROWS
    texts = {name: texts_of(table) for name, table in splits.items()} if is_small else {}
    labels, sizes = tables["labels"], Counter[str]()
    for kind, files in manifest.parameters.get("input", {}).items():
        sizes[kind.partition("/")[0]] += files["bytes"]
    # Labels that are made from the files of all points are not merged: many points name one label.
    derived = sizes["labels"] == sum(sizes[name] for name in splits)
    rejected = {name: table.manifest.counters.get("rejected") for name, table in tables.items()}
    for name, share in (("queries/val", "validation_share"), ("queries/test", "test_share")):
        if manifest.parameters["options"].get(share):  # the split was taken from train, and shares its rejects
            rejected.pop(name, None)
    return {
        "splits": {name: _split_counts(name, table.manifest, texts) for name, table in splits.items()},
        "labels": {
            "labels": labels.rows,
            "merged": 0 if derived else labels.manifest.counters.get("rows_merged", 0),
            "without_training_points": labels.manifest.counters.get("without_training_points", 0),
            "without_text": labels.manifest.counters.get("empty_texts", 0),
        },
        "rejected": {name: reasons for name, reasons in rejected.items() if reasons},
    }


def summary_lines(data: str, summary: Mapping[str, Any]) -> list[str]:
    """Format the summary of the DATA at `data`: one line per table, starting with the labels."""
    labels = summary["labels"]
    parts = [f"{labels['labels']:,}"] + [
        f"{labels[key]:,} {said}" for key, said in _COUNT_TEXTS.items() if labels.get(key)
    ]
    lines = [f"labels: {', '.join(parts)}"]
    for name, counts in summary["splits"].items():
        parts = [f"{counts['points']:,} points, {counts['labels'] / max(1, counts['points']):.1f} labels each"]
        parts += [f"{counts[key]:,} {said}" for key, said in _COUNT_TEXTS.items() if counts.get(key)]
        lines.append(f"{name}: {', '.join(parts)}")
    for name, reasons in summary["rejected"].items():
        rejected = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        lines.append(f"rejected from {name.removeprefix('queries/')}: {rejected}; see {DataLayout(data).rejects}")
    return lines


_COUNT_TEXTS = {
    "merged": "rows merged into another row with the same text",
    "empty_texts": "with an empty text (kept)",
    "in_train": "with a text that is also in train (same tokens): evaluate measures these apart",
    "without_training_points": "without a training point",
    "without_text": "without a text",
}


def _split_counts(name: str, table: Manifest, texts: Mapping[str, pa.Array]) -> dict[str, int]:
    written = table.counters.get("rows_out", table.rows)  # a version may have lost rows: an approximate count
    counts = {
        "points": table.rows,
        "merged": table.counters.get("rows_merged", 0),
        "labels": round(table.counters.get("labels", 0) * table.rows / max(1, written)),
        "empty_texts": table.counters.get("empty_texts", 0),
    }
    if name != _TRAIN and len(texts.get(name, ())):
        counts["in_train"] = int(pc.sum(repeated(texts[name], texts[_TRAIN])).as_py())
    return counts


def seen_queries(data: str, split: str) -> np.ndarray | None:
    """Return which queries of a split have a text that is also in train, bool [N]; None if texts are not compared.

    Texts are not compared if there are more than _COMPARED_ROWS rows. Raises TableError, StorageError.
    """
    layout, parents = DataLayout(data), Table.open(data, "data").parents
    if split == _TRAIN or not {f"queries/{split}", f"queries/{_TRAIN}"} <= parents.keys():
        return None
    tables = {name: Table.open(layout.queries(name), "queries") for name in (split, _TRAIN)}
    if sum(table.rows for table in tables.values()) > _COMPARED_ROWS:
        return None
    texts = {name: texts_of(table) for name, table in tables.items()}
    return repeated(texts[split], texts[_TRAIN]).to_numpy(zero_copy_only=False) if len(texts[split]) else None


def repeated(texts: pa.Array, among: pa.Array) -> pa.Array:
    """Return which `texts` are not empty and also occur in `among`."""
    return pc.and_(pc.greater(pc.binary_length(texts), 0), pc.is_in(texts, value_set=among))


def texts_of(table: Table, rows: int | None = None) -> pa.Array:
    """Return the token ids of `rows` rows, from all parts, as large binary [N]; empty if the table has no token ids."""
    if "input_ids" not in table.columns:
        return pa.array([], pa.large_binary())
    parts = []
    for group in ALL_ROWS.batches(table, ["input_ids"], rows):
        column = group["input_ids"].combine_chunks()
        values = column.values
        width = values.type.bit_width // 8
        offsets = pc.multiply(column.offsets.cast(pa.int64()), width)
        start = values.offset * width
        content = values.buffers()[1].slice(start) if values.buffers()[1] is not None else pa.py_buffer(b"")
        parts.append(pa.Array.from_buffers(pa.large_binary(), len(column), [None, offsets.buffers()[1], content]))
    return pa.concat_arrays(parts) if parts else pa.array([], pa.large_binary())
