"""Labels of a version: those of the input meet those before by their keys; new ones are ordered behind."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.common.exchange import Exchange, Files, Packet, gather, one_batch, split_by
from pipelines.common.flow import Collection, Flow, Tagged
from pipelines.common.summary import SUMMARY, Block
from pipelines.formats.base import LABELS
from pipelines.sharding import rows
from pipelines.sharding.labels import KEYS, OrderedLabels, duplicates
from pipelines.sharding.onto.base import Base
from pipelines.sharding.plans import LabelsPlan
from pipelines.sharding.read import with_hashes
from pipelines.sharding.steps import ROWS, SIZES, encode, every_shard, open_tokens, reported, send_to_shards
from schemas.ragged import offsets_of
from schemas.shard_files.shards import iterate_shard
from schemas.shard_files.viewed import RETIRED

CHANGED, STATES = "changed", "states"
BEFORE = pa.schema(
    [
        ("hash", pa.uint64()),
        ("key", pa.string()),
        ("label_id", pa.int64()),
        ("content", pa.uint64()),
        (RETIRED, pa.bool_()),
    ]
)
STATE = pa.schema([("label_id", pa.int64()), (RETIRED, pa.bool_())])


class VersionLabels(NamedTuple):
    """New labels in order; and by the number of a shard of labels before: `changed` rows and `states` (packets).

    changed: columns of the row with `label_id`. states: columns STATE of labels that retire or come back. All of these
    packets are in files.
    """

    ordered: OrderedLabels
    changed: Collection
    states: Collection


def order_labels_onto(
    flow: Flow, plan: LabelsPlan, base: Base, blocks: list[Block], exchange: Exchange, staged: Files, rejects: Files
) -> VersionLabels:
    """Order new labels by (hash, key), behind those before; tell which of these changed, retire or come back."""
    before = base.views(LABELS)
    routed = flow.create("Blocks of labels", blocks).flat_map("Route labels", route_labels, plan, exchange)
    old = flow.create("Shards before", range(len(before))).flat_map("Read before", read_before, plan, base, exchange)
    every = every_shard(flow, "Shards of labels", plan.shards)
    by_shard = flow.join("Labels by shard", {"rows": routed, "before": old, "every": every})
    tags = (ROWS, KEYS, SIZES, SUMMARY, CHANGED, STATES)
    ordered = by_shard.split("Order labels", tags, order_new_labels, plan, base, exchange, staged, rejects)
    sizes_before = flow.create("Sizes before", [(number, entry.rows) for number, entry in enumerate(before)])
    labels = OrderedLabels(ordered[ROWS], ordered[KEYS], sizes_before + ordered[SIZES], ordered[SUMMARY])
    return VersionLabels(labels, ordered[CHANGED], ordered[STATES])


def route_labels(block: Block, plan: LabelsPlan, exchange: Exchange) -> Iterator[tuple[int, Packet]]:
    """Send the labels of a block to their shards: (shard, packet), before tokens are made."""
    yield from send_to_shards(exchange, block.read().select(plan.raw_schema.names), plan.shards)


def read_before(number: int, plan: LabelsPlan, base: Base, exchange: Exchange) -> Iterator[tuple[int, Packet]]:
    """Send key, id and state of the labels of shard `number` before, and the hash of their content where it counts."""
    entry = base.views(LABELS)[number]
    names = [column.name for column in base.tables[LABELS].columns]
    counted = [name for name in ("text", "feature_ids", "feature_values") if name in names and base.texts]
    columns = ["key", "label_id", *counted, RETIRED]
    for group in iterate_shard(base.place(LABELS), entry, columns):
        (batch,) = group.combine_chunks().to_batches()
        if not base.texts:
            batch = batch.append_column("text", pa.array([""] * batch.num_rows))
        batch = with_hashes(batch, base.seed)
        batch = pa.RecordBatch.from_arrays([batch[name] for name in BEFORE.names], schema=BEFORE)
        yield from send_to_shards(exchange, batch, plan.shards)


def order_new_labels(
    element: tuple[int, dict[str, Any]],
    plan: LabelsPlan,
    base: Base,
    exchange: Exchange,
    staged: Files,
    rejected: Files,
) -> Iterator[Tagged]:
    """Order the labels of (shard, parts): new rows, keys with ids, how many are new, and what changes before."""
    shard, parts = element
    first = offsets_of(np.array([entry.rows for entry in base.views(LABELS)], np.int64))
    ordered = rows.order(gather(parts["rows"], plan.raw_schema))
    before = gather(parts["before"], BEFORE).sort_by("label_id").combine_chunks()
    table = ordered.rows
    place = pc.index_in(table["key"].combine_chunks(), value_set=before["key"].combine_chunks())
    is_new = pc.is_null(place)
    new = _encoded(plan, table.filter(is_new))
    again = table.filter(pc.invert(is_new))
    old = before.take(place.drop_null())
    counters = Counter(rows_in=table.num_rows + ordered.merged + ordered.rejected.num_rows)
    counters.update(rows_merged=ordered.merged, new=new.num_rows)
    if base.texts:
        other = pc.not_equal(again["content"], old["content"])
        changed = _encoded(plan, again.filter(other)).append_column("label_id", old["label_id"].filter(other))
        counters["changed"] = changed.num_rows
        columns = [name for name in plan.schema.names if name != "frequency"]
        yield from _by_shard_before(staged, first, CHANGED, one_batch(changed.select(columns)))
    states = _states(before, old["label_id"], base.complete is not False)
    retiring = int(pc.sum(states[RETIRED]).as_py() or 0)
    counters.update(retired=retiring, returned=states.num_rows - retiring)
    yield from _by_shard_before(staged, first, STATES, one_batch(states))
    keys = pa.table({"key": before["key"], "label_id": before["label_id"]})
    missing = pa.nulls(new.num_rows, pa.int64())
    keys = pa.concat_tables([keys, pa.table({"key": new["key"], "label_id": missing})])
    number = plan.shards_before + shard
    truncated = int(np.count_nonzero(new["truncated"].to_numpy()))
    counters["truncated"] = truncated
    rejects = duplicates(ordered, plan.sources)
    yield Tagged(SUMMARY, reported(LABELS, rejects, rejected, counters={plan.name: counters}))
    yield Tagged(SIZES, (number, new.num_rows))
    for tag, place_of, sent, channel in ((ROWS, number, new, staged), (KEYS, shard, keys, exchange)):
        for packet in channel.send([(place_of, one_batch(sent))]):
            yield Tagged(tag, packet)


def _encoded(plan: LabelsPlan, table: pa.Table) -> pa.Table:
    """Return rows with tokens, of columns `row_schema`."""
    batch = encode(one_batch(table), plan, open_tokens(plan))
    return pa.Table.from_batches([batch.select(plan.row_schema.names)]).cast(plan.row_schema)


def _by_shard_before(staged: Files, first: np.ndarray, tag: str, batch: pa.RecordBatch) -> Iterator[Tagged]:
    """Send rows with `label_id` to the shards of labels before: s has [first[s], first[s + 1])."""
    shard = np.searchsorted(first, batch["label_id"].to_numpy(), side="right") - 1
    yield from (Tagged(tag, packet) for packet in staged.send(split_by(batch, shard)))


def _states(before: pa.Table, listed: pa.ChunkedArray, complete: bool) -> pa.Table:
    """Return the labels whose state changes, columns STATE: `listed` come back; others retire of a `complete` list."""
    is_listed = pc.is_in(before["label_id"], value_set=listed.combine_chunks())
    retired = before[RETIRED]
    returns = pc.and_(retired, is_listed)
    retires = pc.and_(pc.and_(pc.invert(retired), pc.invert(is_listed)), complete)
    changes = before.filter(pc.or_(returns, retires))
    state = pc.invert(changes[RETIRED])
    return pa.table({"label_id": changes["label_id"], RETIRED: state})
