"""Points of one block with their labels' ids: rows for the shards, and rejects. No Beam here."""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats.rejects import Reason, Reject
from pipelines.sharding import filters
from pipelines.sharding.plan import QueriesPlan
from pipelines.sharding.rows import unite
from schemas.shard_files import parquet

Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)


def attach_labels(
    batch: pa.RecordBatch, plan: QueriesPlan, ids: np.ndarray, keys: pa.Array | None
) -> tuple[pa.RecordBatch, list[Reject]]:
    """Return points with `label_ids` of the table's type, and rejects; points without a label are left out.

    ids int64 [mentions]: the ids behind `label_index`, -1 where there is no such label; `keys` are their names.
    A form without keys has `label_ids` already, which must be below `plan.labels`.
    """
    kind = plan.schema.field("label_ids").type.value_type
    if "label_ids" in batch.schema.names:
        return _check_range(batch, plan, kind)
    if plan.pairs and "label_index" not in batch.schema.names:
        none = parquet.list_array(np.zeros(0, np.int64), np.zeros(batch.num_rows + 1, np.int64), kind)
        return batch.append_column("label_ids", none), []
    index, offsets = parquet.list_column(pa.table(batch), "label_index")
    owner = np.repeat(np.arange(batch.num_rows), np.diff(offsets))
    label_ids = ids[index]
    exists = label_ids >= 0
    batch = batch.append_column("label_ids", unite(owner[exists], label_ids[exists], batch.num_rows, kind))
    if exists.all():
        return batch, []
    assert keys is not None
    unknown = batch.select(["part", "row", "key"]).take(pa.array(owner[~exists]))
    unknown = unknown.append_column("label", keys.take(pa.array(index[~exists])))
    detail = "{key} names the label {label}, which is not among the labels"
    rejects = reject_rows(unknown, plan.sources, Reason.UNKNOWN_LABEL, detail)
    if plan.pairs:
        return batch, rejects
    batch, lost = without_labels(batch, plan.sources)
    return batch, rejects + lost


def attach_filters(batch: pa.RecordBatch, pairs: np.ndarray | None, plan: QueriesPlan) -> pa.RecordBatch:
    """Return points with `filter_label_ids` where the table has them; `pairs` int64 [F, 2] are sorted (row, label)."""
    if pairs is None:
        return batch
    kind = plan.schema.field("filter_label_ids").type.value_type
    return batch.append_column("filter_label_ids", filters.join_pairs(batch["row"].to_numpy(), pairs, kind))


def without_labels(rows: Rows, sources: Mapping[int, str]) -> tuple[Rows, list[Reject]]:
    """Return rows that have a label, and rejects for the others."""
    labelled = pc.greater(pc.list_value_length(rows["label_ids"]), 0)
    if pc.all(labelled, min_count=0).as_py():
        return rows, []
    lost = rows.select(["part", "row", "key"]).filter(pc.invert(labelled))
    detail = "the point {key} is left without a label"
    return rows.filter(labelled), reject_rows(lost, sources, Reason.NO_LABELS, detail)


def reject_rows(rows: Rows, sources: Mapping[int, str], reason: Reason, detail: str) -> list[Reject]:
    """Reject `rows` with the columns part, row, and those that `detail` names in braces."""
    rejects = []
    for row in rows.to_pylist():
        values = {name: ascii(value)[:80] for name, value in row.items()}
        rejects.append(Reject(sources[row["part"]], row["row"] + 1, reason, detail.format(**values)))
    return rejects


def _check_range(batch: pa.RecordBatch, plan: QueriesPlan, kind: pa.DataType) -> tuple[pa.RecordBatch, list[Reject]]:
    values, offsets = parquet.list_column(pa.table(batch), "label_ids")
    column = batch.schema.get_field_index("label_ids")
    beyond = values >= plan.labels
    rejects: list[Reject] = []
    if beyond.any():
        owner = np.repeat(np.arange(batch.num_rows), np.diff(offsets))
        # Labels are sorted: of a row's labels beyond the end the last is the largest.
        worst = dict(zip(owner[beyond].tolist(), values[beyond].tolist(), strict=True))
        wrong = batch.select(["part", "row"]).take(pa.array(list(worst)))
        wrong = wrong.append_column("label", pa.array(list(worst.values())))
        detail = f"label {{label}} does not exist: there are labels 0 to {plan.labels - 1}"
        rejects = reject_rows(wrong, plan.sources, Reason.LABEL_OUT_OF_RANGE, detail)
        batch = batch.filter(pa.array(~np.isin(np.arange(batch.num_rows), list(worst))))
    return batch.set_column(column, "label_ids", batch["label_ids"].cast(pa.list_(kind))), rejects
