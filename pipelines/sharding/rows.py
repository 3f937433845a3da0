"""Pure functions that put rows into their final order, merge duplicates, attach label ids to points, and reject rows.

The handling of duplicates does not depend on file names or line numbers. Rows with the same key and content become one
row with all their labels. If rows with the same key differ in content, the row with the smallest content hash is
retained, and the other rows are rejected.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats.base import Reason, Reject
from pipelines.sharding.plans import QueriesPlan
from schemas import PAD
from schemas.ragged import offsets_of
from schemas.shard_files import parquet

LISTS = ("label_ids", "filter_label_ids")  # list columns that are united when rows are merged


class Ordered(NamedTuple):
    """Rows in the order of (hash, key), with distinct keys. merged: number of rows that were merged into other rows.

    rejected, kept: columns part, row and key of each rejected row, and of the retained row with the same key.
    """

    rows: pa.Table
    merged: int
    rejected: pa.Table
    kept: pa.Table


def order(rows: pa.Table) -> Ordered:
    """Sort rows [N] by hash, key, content, part and row, and handle duplicates; unite the LISTS of merged rows."""
    rows = _sort(rows)
    place = rows.select(["part", "row", "key"])
    count = rows.num_rows
    starts = np.ones(count, bool)  # marks the first row of each key
    tied, same = _ties(rows)
    starts[tied[same] + 1] = False
    if starts.all():
        return Ordered(rows, 0, place.slice(0, 0), place.slice(0, 0))
    first = np.flatnonzero(starts)
    group = np.cumsum(starts) - 1
    content = rows["content"].to_numpy()
    same = content == content[first[group]]
    other = np.flatnonzero(~same)
    kept = rows.take(pa.array(first))
    for name in LISTS:
        if name in rows.column_names:
            values, offsets = parquet.list_column(rows, name)
            owner = np.repeat(group, np.diff(offsets))
            take = np.repeat(same, np.diff(offsets))
            united = unite(owner[take], values[take], len(first), rows.schema.field(name).type.value_type)
            kept = kept.set_column(kept.schema.get_field_index(name), rows.schema.field(name), united)
    merged = count - len(first) - len(other)
    return Ordered(kept, merged, place.take(pa.array(other)), place.take(pa.array(first[group[other]])))


def unite(owner: np.ndarray, ids: np.ndarray, rows: int, kind: pa.DataType) -> pa.ListArray:
    """Turn unordered pairs (owner[i], ids[i]) into a list column with the sorted, distinct ids of each row."""
    by = np.lexsort((ids, owner))
    owner, ids = owner[by], ids[by]
    new = np.ones(len(ids), bool)
    new[1:] = (owner[1:] != owner[:-1]) | (ids[1:] != ids[:-1])
    return parquet.list_array(ids[new], offsets_of(np.bincount(owner[new], minlength=rows)), kind)


def add_pairs(rows: pa.Table, keys: pa.Array, ids: np.ndarray) -> tuple[pa.Table, np.ndarray]:
    """Add the labels `ids` [P] to the rows with the keys `keys` [P]; return rows, and bool [P] for missing keys."""
    column = rows["key"].combine_chunks()
    places = pc.index_in(keys, value_set=column).fill_null(-1).to_numpy()
    values, offsets = parquet.list_column(rows, "label_ids")
    owner = np.concatenate([np.repeat(np.arange(rows.num_rows), np.diff(offsets)), places[places >= 0]])
    kind = rows.schema.field("label_ids").type.value_type
    united = unite(owner, np.concatenate([values, ids[places >= 0]]).astype(np.int64), rows.num_rows, kind)
    number = rows.schema.get_field_index("label_ids")
    return rows.set_column(number, rows.schema.field("label_ids"), united), places < 0


def _sort(rows: pa.Table) -> pa.Table:
    """Sort by (hash, key, content, part, row)."""
    rows = rows.combine_chunks()
    by = [rows[name].to_numpy() for name in ("row", "part", "content", "hash")]
    done = rows.take(pa.array(np.lexsort(by))).combine_chunks()
    if not _ties(done)[1].all():
        # Two keys have the same hash: this is rare, so a slow method suffices.
        names = ("hash", "key", "content", "part", "row")
        return rows.sort_by([(name, "ascending") for name in names]).combine_chunks()
    return done


def _ties(rows: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows with the same hash as the next row, and which of these rows also have the same key."""
    hashes, keys = rows["hash"].to_numpy(), rows["key"]
    tied = np.flatnonzero(hashes[1:] == hashes[:-1])
    same = pc.equal(keys.take(pa.array(tied)), keys.take(pa.array(tied + 1)))
    return tied, same.to_numpy(zero_copy_only=False)


Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)


def attach_labels(
    batch: pa.RecordBatch, plan: QueriesPlan, ids: np.ndarray, keys: pa.Array | None
) -> tuple[pa.RecordBatch, list[Reject]]:
    """Return the points that have labels, with `label_ids` of the table's type, and rejects.

    ids int64 [mentions]: the ids for `label_index`, -1 for unknown labels. keys: the keys of these labels. In a format
    without keys, points already have `label_ids`, which must be below `plan.labels`.
    """
    kind = plan.schema.field("label_ids").type.value_type
    if "own_index" in batch.schema.names:
        own = ids[batch["own_index"].to_numpy()]
        same = parquet.list_array(own[own >= 0], offsets_of((own >= 0).astype(np.int64)), kind)
        batch = batch.append_column("filter_label_ids", same)
    if "label_ids" in batch.schema.names:
        return _check_range(batch, plan, kind)
    if plan.has_pairs and "label_index" not in batch.schema.names:
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
    detail = "{key} names the unknown label {label}"
    rejects = reject_rows(unknown, plan.sources, Reason.UNKNOWN_LABEL, detail)
    if plan.has_pairs:
        return batch, rejects
    batch, lost = without_labels(batch, plan.sources)
    return batch, rejects + lost


def join_pairs(rows: np.ndarray, pairs: np.ndarray, type: pa.DataType) -> pa.ListArray:
    """Return the labels of `rows` [B] according to the sorted `pairs` (int64 [F, 2]), as a list column of `type`."""
    first = np.searchsorted(pairs[:, 0], rows, "left")
    counts = np.searchsorted(pairs[:, 0], rows, "right") - first
    offsets = offsets_of(counts)
    picked = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts)
    return parquet.list_array(pairs[picked, 1], offsets, type)


def without_positives(rows: pa.Table) -> pa.Table:
    """Return the rows without the filter pairs that are positives."""
    filters, labels = (parquet.list_column(rows, name) for name in ("filter_label_ids", "label_ids"))
    number, field = rows.schema.get_field_index("filter_label_ids"), rows.schema.field("filter_label_ids")
    own = filters.padded()
    left = filters.keep(~labels.contains(own)[own != PAD])
    return rows.set_column(number, field, parquet.list_array(*left, field.type.value_type))


def without_labels(rows: Rows, sources: Mapping[int, str]) -> tuple[Rows, list[Reject]]:
    """Return the rows that have a label, and rejects for the other rows."""
    labelled = pc.greater(pc.list_value_length(rows["label_ids"]), 0)
    if pc.all(labelled, min_count=0).as_py():
        return rows, []
    lost = rows.select(["part", "row", "key"]).filter(pc.invert(labelled))
    detail = "the point {key} has no label left"
    return rows.filter(labelled), reject_rows(lost, sources, Reason.NO_LABELS, detail)


def reject_rows(rows: Rows, sources: Mapping[int, str], reason: Reason, detail: str) -> list[Reject]:
    """Reject `rows`, which have the columns part and row, and the columns that `detail` names in braces."""
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
        # Labels are sorted, so the last label of a row is the largest.
        worst = dict(zip(owner[beyond].tolist(), values[beyond].tolist(), strict=True))
        wrong = batch.select(["part", "row"]).take(pa.array(list(worst)))
        wrong = wrong.append_column("label", pa.array(list(worst.values())))
        detail = f"label {{label}} does not exist; the labels are 0 to {plan.labels - 1}"
        rejects = reject_rows(wrong, plan.sources, Reason.LABEL_OUT_OF_RANGE, detail)
        batch = batch.filter(pa.array(~np.isin(np.arange(batch.num_rows), list(worst))))
    return batch.set_column(column, "label_ids", batch["label_ids"].cast(pa.list_(kind))), rejects
