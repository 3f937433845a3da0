"""Points that come again: the rows of their keys in older parts, which the view leaves out."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.common.exchange import Exchange, receive
from pipelines.common.flow import Collection, Tagged
from pipelines.common.summary import SUMMARY, Summary
from pipelines.sharding.labels import count_labels
from pipelines.sharding.onto.base import Base
from pipelines.sharding.onto.patches import write_patch
from pipelines.sharding.plans import QueriesPlan
from pipelines.sharding.queries import FREQUENCIES
from pipelines.sharding.steps import first_ids
from schemas.shard_files.parquet import list_column
from schemas.shard_files.shards import open_shard, read_group
from schemas.shard_files.viewed import POSITION, ViewedShard


def leave_out(
    keys: Collection, plan: QueriesPlan, base: Base, built: str, label_sizes: dict[int, int], exchange: Exchange
) -> dict[str, Collection]:
    """Leave out the older rows of new `keys` (older shard, packet): `summary`, and `frequencies` that are less."""
    by_shard, tags = keys.group(f"Keys by older shard of {plan.split}"), (SUMMARY, FREQUENCIES)
    return by_shard.split(f"Find keys of {plan.split}", tags, find_gone, plan, base, built, label_sizes, exchange)


def find_gone(
    element: tuple[int, Any], plan: QueriesPlan, base: Base, built: str, label_sizes: dict[int, int], exchange: Exchange
) -> Iterator[Any]:
    """Write the patch of an older shard without the rows of (number, packets of keys), and count their labels less."""
    number, packets = element
    entry, url = base.views(plan.name)[number], base.place(plan.name)
    view = entry.view
    assert view is not None
    keys = pa.concat_arrays([batch["key"] for batch in receive(packets)])
    kept, leaving, labels = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    with open_shard(url, entry) as file:
        assert isinstance(file, ViewedShard)
        for group in range(file.num_row_groups):
            rows = read_group(file, group, ["key", "label_ids"], f"{url}, part {view.part}, {entry.path}")
            gone = pc.is_in(rows["key"], value_set=keys).to_numpy()
            positions = file.positions(group)
            kept.append(positions[~gone])
            leaving.append(positions[gone])
            if gone.any():
                labels.append(list_column(rows.filter(pa.array(gone)), "label_ids").values.astype(np.int64))
    left, lost = np.concatenate(kept), sum(len(some) for some in leaving)
    if not lost:
        return
    gone_rows = np.setdiff1d(np.arange(view.rows), left)
    starts = np.arange(0, view.rows, view.row_group_rows)
    live = np.bincount(left // view.row_group_rows, minlength=len(starts))
    gone_rows = pa.table({POSITION: gone_rows})
    patched = write_patch(built, plan.name, number, "gone", gone_rows, tuple(live[live > 0].tolist()))
    summary = Summary(counters={plan.name: Counter(replaced=lost)}, patched=(patched,))
    yield Tagged(SUMMARY, summary)
    sent = [
        (shard, batch.set_column(1, "count", pc.negate(batch["count"])))
        for shard, batch in count_labels(np.concatenate(labels), first_ids(label_sizes))
    ]
    for place in exchange.send(sent):
        yield Tagged(FREQUENCIES, place)
