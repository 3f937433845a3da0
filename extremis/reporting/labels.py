"""Tables of labels of the evaluations on a page, packed for its script."""

import base64
import gzip
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from extremis.label_tables import path_beside
from extremis.reporting.records import Run, evaluated_splits, say_split
from schemas import storage

MOST_BYTES = 2_000_000  # of all tables, packed
_EXAMPLES = 3_000  # labels, those with the most errors, that are shown with examples
BEYOND = -1  # a median rank beyond the ranks that were looked at


class PackedLabels(NamedTuple):
    """Tables for the script: JSON, compressed, as base64; and facts of each."""

    packed: str
    tables: list[dict[str, Any]]


def pack_labels(runs: Sequence[Run]) -> PackedLabels:
    """Pack the tables of all evaluations, labels with the most errors first. Raises StorageError.

    Labels without positives and predictions are left out, and others if the page would grow by more than MOST_BYTES.
    """
    facts, columns = [], []
    for split in evaluated_splits(runs):
        for run in (run for run in runs if "labels" in run.evaluations.get(split, {})):
            body = run.evaluations[split]
            table = pq.read_table(pa.BufferReader(storage.read_bytes(path_beside(body["file"]))))
            columns.append(_shorten(table))
            facts.append(
                {"run": run.name, "split": split, "title": say_split(split), **body["labels"], **body["at_decision"]}
            )
    packed, share = _pack(columns, 1.0)
    if len(packed) > MOST_BYTES:
        packed, share = _pack(columns, 0.95 * MOST_BYTES / len(packed))
    for fact, table in zip(facts, columns, strict=True):
        fact |= {"listed": table.num_rows, "shown": int(share * table.num_rows)}
    return PackedLabels(packed, facts)


def _shorten(table: pa.Table) -> pa.Table:
    errors = pc.subtract(pc.add(table["support"], table["predicted"]), pc.multiply(2, table["found"]))
    table = table.append_column("errors", errors)
    table = table.filter(pc.greater(pc.add(table["support"], table["predicted"]), 0)).sort_by(
        [("errors", "descending")]
    )
    for number, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if pa.types.is_floating(column.type):
            finite = pc.if_else(pc.is_inf(column), float(BEYOND), column)
            table = table.set_column(number, name, pc.round(finite, 1))
    return table


def _pack(tables: Sequence[pa.Table], share: float) -> tuple[str, float]:
    """Pack the first `share` of the rows of each table; examples only of the first ones."""
    bodies = []
    for table in tables:
        body = table.slice(0, int(share * table.num_rows)).to_pydict()
        for name in body:
            if "_query" in name and not name.endswith("queries"):
                body[name] = body[name][: _EXAMPLES // len(tables)]
        bodies.append(body)
    text = json.dumps(bodies, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    return base64.b64encode(gzip.compress(text, mtime=0)).decode(), share
