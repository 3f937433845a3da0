"""Points of one block with their labels' ids: rows for the shards, and rejects. No Beam here."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from pipelines.formats.rejects import Reason, Reject
from pipelines.sharding import filters
from pipelines.sharding.plan import QueriesPlan
from pipelines.sharding.rows import unite
from schemas.shard_files import parquet


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
    rejects = _unknown(batch, plan.sources, owner[~exists], index[~exists], keys)
    if plan.pairs:
        return batch, rejects
    return _drop(batch, plan.sources, np.bincount(owner[exists], minlength=batch.num_rows) == 0, rejects)


def attach_filters(batch: pa.RecordBatch, pairs: np.ndarray | None, plan: QueriesPlan) -> pa.RecordBatch:
    """Return points with `filter_label_ids` where the table has them; `pairs` int64 [F, 2] are sorted (row, label)."""
    if pairs is None:
        return batch
    kind = plan.schema.field("filter_label_ids").type.value_type
    return batch.append_column("filter_label_ids", filters.join_pairs(batch["row"].to_numpy(), pairs, kind))


def without_labels(table: pa.Table, sources: Mapping[int, str]) -> tuple[pa.Table, list[Reject]]:
    """Return ordered rows that have a label, and rejects for the others."""
    empty = parquet.list_column(table, "label_ids").counts == 0
    if not empty.any():
        return table, []
    rejects = [
        _no_labels(row, sources) for row in table.filter(pa.array(empty)).select(["part", "row", "key"]).to_pylist()
    ]
    return table.filter(pa.array(~empty)), rejects


def _check_range(batch: pa.RecordBatch, plan: QueriesPlan, kind: pa.DataType) -> tuple[pa.RecordBatch, list[Reject]]:
    values, offsets = parquet.list_column(pa.table(batch), "label_ids")
    column = batch.schema.get_field_index("label_ids")
    beyond = values >= plan.labels
    rejects: list[Reject] = []
    if beyond.any():
        owner = np.repeat(np.arange(batch.num_rows), np.diff(offsets))
        # Labels are sorted: of a row's labels beyond the end the last is the largest.
        worst = dict(zip(owner[beyond].tolist(), values[beyond].tolist(), strict=True))
        for row, label in worst.items():
            place = plan.sources[batch["part"][row].as_py()], batch["row"][row].as_py() + 1
            detail = f"label {label} does not exist: there are labels 0 to {plan.labels - 1}"
            rejects.append(Reject(*place, Reason.LABEL_OUT_OF_RANGE, detail))
        batch = batch.filter(pa.array(~np.isin(np.arange(batch.num_rows), list(worst))))
    return batch.set_column(column, "label_ids", batch["label_ids"].cast(pa.list_(kind))), rejects


def _unknown(
    batch: pa.RecordBatch, sources: Mapping[int, str], owner: np.ndarray, index: np.ndarray, keys: pa.Array | None
) -> list[Reject]:
    assert keys is not None
    rows = pa.array(owner)
    columns = [batch["part"].take(rows), batch["row"].take(rows), batch["key"].take(rows), keys.take(pa.array(index))]
    return [
        Reject(
            sources[part],
            row + 1,
            Reason.UNKNOWN_LABEL,
            f"{ascii(key)[:80]} names the label {ascii(label)[:80]}, which is not among the labels",
        )
        for part, row, key, label in zip(*(column.to_pylist() for column in columns), strict=True)
    ]


def _drop(
    batch: pa.RecordBatch, sources: Mapping[int, str], gone: np.ndarray, rejects: list[Reject]
) -> tuple[pa.RecordBatch, list[Reject]]:
    lost = batch.filter(pa.array(gone)).select(["part", "row", "key"]).to_pylist()
    return batch.filter(pa.array(~gone)), [*rejects, *(_no_labels(row, sources) for row in lost)]


def _no_labels(row: dict, sources: Mapping[int, str]) -> Reject:
    detail = f"the point {ascii(row['key'])[:80]} is left without a label"
    return Reject(sources[row["part"]], row["row"] + 1, Reason.NO_LABELS, detail)
