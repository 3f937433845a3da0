"""Tables of labels of the evaluations on a page, packed for its script."""

import base64
import gzip
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from extremis.label_tables import path_beside
from extremis.reporting.records import Run, evaluated_splits, plain_values, say_split
from schemas import storage

MOST_BYTES = 2_000_000  # of all tables, packed


def pack_labels(runs: Sequence[Run]) -> tuple[str, list[dict[str, Any]]]:
    """Pack the tables of all evaluations, labels with the most errors first; return base64, and facts of each table.

    Labels without positives and predictions are left out, and the last ones if there are more than MOST_BYTES. Raises
    StorageError.
    """
    tables, facts = list[pa.Table](), list[dict[str, Any]]()
    for split in evaluated_splits(runs):
        for run in (run for run in runs if split in run.evaluations):
            body = run.evaluations[split]
            table = pq.read_table(pa.BufferReader(storage.read_bytes(path_beside(body["file"]))))
            support, predicted, found = (table[name].to_numpy() for name in ("support", "predicted", "found"))
            order = np.argsort(2 * found - support - predicted, kind="stable")
            tables.append(table.take(order[(support + predicted)[order] > 0]))
            names = {"run": run.name, "split": split, "title": say_split(split), "listed": tables[-1].num_rows}
            facts.append({**body["at_decision"], **body["labels"], **names})
    share = 1.0
    while len(packed := _pack(tables, share)) > MOST_BYTES:
        share *= 0.95 * MOST_BYTES / len(packed)
    return packed, [{**of, "shown": int(share * of["listed"])} for of in facts]


def _pack(tables: Sequence[pa.Table], share: float) -> str:
    """Pack the first `share` of the rows of each table as JSON, compressed, as base64."""
    kept = [table.slice(0, int(share * table.num_rows)) for table in tables]
    columns = [{name: plain_values(table[name].to_pylist()) for name in table.column_names} for table in kept]
    text = json.dumps(columns, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    return base64.b64encode(gzip.compress(text, mtime=0)).decode()
