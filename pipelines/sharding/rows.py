"""Rows in their final order, each key once. No Beam here.

The rule for duplicates depends on neither files nor lines: rows of one key and one content are one row, with the labels
of all; of rows of one key with different contents that with the smallest content hash stays, the others are rejected.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.ragged import offsets_of
from schemas.shard_files import parquet

LISTS = ("label_ids", "filter_label_ids")  # united over the rows that are merged


class Ordered(NamedTuple):
    """rows: by (hash, key), each key once. merged: how many rows went into others.

    rejected, kept: for each rejected row its place (columns part, row, key), and the place of the row that stays.
    """

    rows: pa.Table
    merged: int
    rejected: pa.Table
    kept: pa.Table


def order(rows: pa.Table) -> Ordered:
    """Put rows [N] with hash, key, content, part, row into their final order; lists of LISTS are united."""
    rows = _sort(rows)
    place = rows.select(["part", "row", "key"])
    count = rows.num_rows
    starts = _starts(rows)
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
    """Turn pairs (owner[i], ids[i]) in any order into a list column: the ids of each row, sorted, once each."""
    by = np.lexsort((ids, owner))
    owner, ids = owner[by], ids[by]
    new = np.ones(len(ids), bool)
    new[1:] = (owner[1:] != owner[:-1]) | (ids[1:] != ids[:-1])
    return parquet.list_array(ids[new], offsets_of(np.bincount(owner[new], minlength=rows)), kind)


def add_pairs(rows: pa.Table, keys: pa.Array, ids: np.ndarray) -> tuple[pa.Table, np.ndarray]:
    """Add the labels `ids` [P] of the query `keys` [P] to ordered rows; and tell which keys are no row's, bool [P]."""
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
        # Two keys have one hash: rare enough for the slow way.
        names = ("hash", "key", "content", "part", "row")
        return rows.sort_by([(name, "ascending") for name in names]).combine_chunks()
    return done


def _starts(rows: pa.Table) -> np.ndarray:
    """Mark each ordered row that is the first of its key: bool [N]."""
    starts = np.ones(rows.num_rows, bool)
    tied, same = _ties(rows)
    starts[tied[same] + 1] = False
    return starts


def _ties(rows: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the ordered rows whose hash the next row has, too; and which of them have its key as well."""
    hashes, keys = rows["hash"].to_numpy(), rows["key"]
    tied = np.flatnonzero(hashes[1:] == hashes[:-1])
    same = pc.equal(keys.take(pa.array(tied)), keys.take(pa.array(tied + 1)))
    return tied, same.to_numpy(zero_copy_only=False)
