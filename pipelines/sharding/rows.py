"""Rows of the queries: from raw lines, in their final order, and counted. No Beam here."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from pipelines.sharding import assign, filters, parse, tokenizer
from pipelines.sharding.plans import QueriesPlan
from pipelines.sharding.rejects import Reason, Reject
from schemas import parquet


def encode_points(
    raw: Sequence[bytes], first_row: int, pairs: np.ndarray, plan: QueriesPlan, tokens: Tokenizer
) -> tuple[pa.RecordBatch, list[Reject]]:
    """Raw lines [B] from 0-based row `first_row` on to rows of `plan.row_schema`, and the rejects.

    `pairs` int64 [F, 2]: filter pairs (row, label) of these lines, sorted.
    """
    points = parse.parse_points(raw, first_row, plan.file, plan.labels, plan.text)
    batch = points.batch
    texts = batch["text"].to_pylist()
    values, offsets, truncated = tokenizer.encode(tokens, texts)
    schema = plan.row_schema
    columns = {
        "hash": pa.array(assign.hash_keys(batch["key"].to_pylist(), plan.seed), pa.uint64()),
        "row": batch["row"],
        "truncated": pa.array(truncated),
        "merged": batch["merged"],
        "key": batch["key"],
        "input_ids": parquet.list_array(values, offsets, schema.field("input_ids").type.value_type),
        "label_ids": batch["label_ids"].cast(schema.field("label_ids").type),
    }
    if "filter_label_ids" in schema.names:
        kind = schema.field("filter_label_ids").type.value_type
        columns["filter_label_ids"] = filters.join_pairs(batch["row"].to_numpy(), pairs, kind)
    if "text" in schema.names:
        columns["text"] = batch["text"]
    rows = pa.record_batch([columns[name] for name in schema.names], schema=schema)
    if plan.share != (0.0, 1.0):
        rows = rows.filter(pa.array(assign.in_share(rows["hash"].to_numpy(), plan.share)))
    return rows, points.rejects if plan.reports else []


def order(rows: pa.Table, file: str) -> tuple[pa.Table, list[Reject]]:
    """Rows by (hash, key, line); of rows with one key only the first in the file stays, the others are rejected."""
    rows = rows.sort_by([("hash", "ascending"), ("key", "ascending"), ("row", "ascending")]).combine_chunks()
    keys = rows["key"].to_pylist()
    lines = rows["row"].to_pylist()
    again = [i for i in range(1, len(keys)) if keys[i] == keys[i - 1]]
    rejects = []
    first = 0
    for i in again:
        first = first if keys[first] == keys[i] else i - 1
        detail = f"the uid {ascii(keys[i])[:80]} is that of line {lines[first] + 1}"
        rejects.append(Reject(file, lines[i] + 1, Reason.DUPLICATE_UID, detail))
    if again:
        rows = rows.take(pa.array(np.delete(np.arange(len(keys)), again)))
    return rows, rejects


def count(rows: pa.Table) -> Counter[str]:
    """The manifest's counters of ordered rows."""
    tokens = np.diff(parquet.list_column(rows, "input_ids")[1])
    counts = {
        "rows_out": rows.num_rows,
        "tokens": tokens.sum(),
        "truncated": rows["truncated"].to_numpy().sum(),
        "empty_texts": (tokens == 0).sum(),
        "labels": len(parquet.list_column(rows, "label_ids")[0]),
        "labels_merged": rows["merged"].to_numpy().sum(),
    }
    if "filter_label_ids" in rows.column_names:
        counts["filter_pairs_applied"] = len(parquet.list_column(rows, "filter_label_ids")[0])
    return Counter({name: int(n) for name, n in counts.items()})
