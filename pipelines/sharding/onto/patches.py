"""Patches of a version: small Parquet files beside the manifest of the table that they belong to."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.common.exchange import gather, receive
from pipelines.common.summary import Patched, Summary
from pipelines.formats.base import LABELS
from pipelines.sharding.labels import sum_counts
from pipelines.sharding.onto.base import Base
from pipelines.sharding.onto.labels import STATE
from schemas import storage
from schemas.shard_files.parquet import encode
from schemas.shard_files.shards import iterate_shard, open_shard
from schemas.shard_files.viewed import POSITION, RETIRED, ViewedShard
from schemas.storage import join

_GROUP_ROWS = 1 << 16


def write_patch(
    built: str, table: str, number: int, kind: str, rows: pa.Table, groups: tuple[int, ...] | None = None
) -> Patched:
    """Write a patch of `kind` over shard `number` of `table`, in the attempt at `built`. Raises StorageError."""
    file = f"_{kind}-{number:05d}.parquet"  # no shard, for readers of Parquet folders
    data = memoryview(encode(rows, _GROUP_ROWS))
    storage.write_bytes(join(built, table, file), data)
    return Patched(table, number, kind, file, len(data), storage.sha256(data), groups)


def patch_labels(element: tuple[int, dict[str, Any]], base: Base, built: str) -> Summary:
    """Write the patches of shard `number` of the labels before, from (number, counts, states and changed rows)."""
    number, parts = element
    entry, url = base.views(LABELS)[number], base.place(LABELS)
    assert entry.view is not None
    first = entry.view.first
    before = pa.concat_tables(iterate_shard(url, entry, ["frequency", RETIRED]))
    was = before["frequency"].to_numpy()
    frequency = was + sum_counts(receive(parts["counts"]), first, entry.rows)
    retired = before[RETIRED].to_numpy().copy()
    states = gather(parts["states"], STATE)
    retired[states["label_id"].to_numpy() - first] = states[RETIRED].to_numpy()
    columns = pa.table({"frequency": frequency, RETIRED: retired})
    patched = [write_patch(built, LABELS, number, "columns", columns)]
    changed = [pa.Table.from_batches([batch]) for batch in receive(parts["changed"])]
    if changed:
        rows = pa.concat_tables(changed)
        place = rows.column_names.index("label_id")
        rows = rows.set_column(place, POSITION, pc.subtract(rows["label_id"], first)).sort_by(POSITION)
        rows = _over(_changed_before(url, entry), rows)
        patched.append(write_patch(built, LABELS, number, "changed", rows))
    more = Counter(without_training_points=int((frequency == 0).sum()) - int((was == 0).sum()))
    return Summary(counters={LABELS: more}, patched=tuple(patched))


def _changed_before(url: str, entry: Any) -> pa.Table | None:
    with open_shard(url, entry) as file:
        assert isinstance(file, ViewedShard)
        return file.changed


def _over(older: pa.Table | None, newer: pa.Table) -> pa.Table:
    """Return the changed rows of both, by position, each position once: the newer one's."""
    if older is None:
        return newer
    stays = pc.invert(pc.is_in(older[POSITION], value_set=newer[POSITION].combine_chunks()))
    kept = older.filter(stays).select(newer.column_names).cast(newer.schema)
    return pa.concat_tables([kept, newer]).sort_by(POSITION)
