"""Labels get ids, points find the ids of their labels, and both are written as shards.

The flows come first, in the order in which `pipelines/shard.py` runs them, each with the stages that workers execute;
then the functions on rows that the stages share. `(shard, packet)` locates a batch of rows for a shard. A mention is a
label key that points of a block name; points refer to it by its position (`label_index`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.flow import (
    Collection,
    Flow,
    Packet,
    Tagged,
    flatten,
    gather,
    read_locations,
    receive,
    send_together,
    split_by,
    to_record_batch,
)
from pipelines.formats.base import LABELS, PAIRS, Reason, Reject
from pipelines.job import SUMMARY, StagedBlock, Summary
from pipelines.sharding import plans, read
from pipelines.sharding.earlier import route_keys
from pipelines.sharding.plans import LabelsPlan, QueriesPlan
from schemas import PAD, storage
from schemas.arrow import TITLES
from schemas.hashing import hash_strings, in_hash_range
from schemas.ragged import Ragged, offsets_of
from schemas.shard_files import parquet, shards
from schemas.sizes import batch_by_size

KEYS, FREQUENCIES, REPEATED_KEYS = "keys", "frequencies", "again"  # tags of collections
# Steps whose progress is shown. SEND and LOOK_UP count keys as rows.
ENCODE_LABELS, ORDER_LABELS, WRITE_LABELS = "tokenize labels", "order labels", "write labels"
SEND, LOOK_UP = "send keys of labels", "find labels"
ENCODE_QUERIES, ORDER_QUERIES, WRITE_QUERIES = "tokenize", "order", "write"

LISTS = ("label_ids", "filter_label_ids")  # list columns that are united when rows are merged
_UNORDERED = ("input_ids", TITLES, *read.CONTENT)  # no part in the order; most of the bytes
_POSITION = "position"
PAIRS_SCHEMA = pa.schema(
    [("hash", pa.uint64()), ("part", pa.int32()), ("row", pa.int64()), ("key", pa.string()), ("label_id", pa.int64())]
)
BEFORE_SCHEMA = pa.schema([("key", pa.string()), ("label_id", pa.int64())])

_REFERENCES = 1 << 17  # packets of mentions: some runners keep all packets in the launching process
_LOOKED_UP = 1 << 20  # mentions per call: Arrow builds the hash table of the shard's keys again in each call
_LOOKUP_TASKS = 16  # minimum number of tasks that look up keys

OrderedLabels = dict[str, Collection]  # what `order_labels` returns, by tag
BlockGroup = tuple[StagedBlock, ...]
Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)


# Labels get ids.


def order_labels(flow: Flow, plan: LabelsPlan, blocks: list[StagedBlock]) -> OrderedLabels:
    """Order labels by id: by (hash, key), or by row in a format without keys.

    Returns the collections `rows` and `keys` (shard, packet), `sizes` (shard, number of labels), and `summary`. In a
    version, the shards of earlier labels have the lowest numbers, and the shards of new labels follow. `keys` are
    sharded by the hash of the key, and contain the ids of labels that already have ids.
    """
    encoded = flow.create("Blocks of labels", blocks).flat_map("Encode labels", encode_labels, plan)
    every = flow.create("Shards of labels", [(shard, None) for shard in range(plan.shards)])  # even without labels
    joined = flow.join("Labels by shard", {"rows": encoded, "every": every})
    return joined.split("Order labels", (read.ROWS, KEYS, read.SIZES, SUMMARY), sort_labels, plan)


def encode_labels(block: StagedBlock, plan: LabelsPlan) -> Iterator[tuple[int, Packet]]:
    """Tokenize the labels of a block and send them to their shards: (shard, packet)."""
    plan.meter.start(ENCODE_LABELS)
    batch = read.encode(block.read(), plan).select(plan.row_schema.names)
    if plan.keyed:
        parts = read.by_shard(batch, plan.shards)
    else:
        parts = split_by(batch, batch["row"].to_numpy() // plan.shard_rows)
    yield from plan.meter.count_bytes(ENCODE_LABELS, plan.exchange.send(parts))
    plan.meter.count(ENCODE_LABELS, batch.num_rows)


def sort_labels(element: tuple[int, dict[str, Any]], plan: LabelsPlan) -> Iterator[Tagged]:
    """Order the labels in (shard, packets by collection); yield the shard's rows, keys, size and summary."""
    shard, packets = element
    plan.meter.start(ORDER_LABELS)
    table = gather(packets["rows"], plan.row_schema)
    rejects: list[Reject] = []
    counters: Counter[str] = Counter(rows_in=table.num_rows)
    if plan.keyed:
        ordered = order_rows(table)
        table = ordered.rows
        counters["rows_merged"] = ordered.merged
        rejects = duplicates(ordered, plan.sources)
    else:
        table = table.sort_by("row")
    yield from send_sorted(shard, plan, table, table.select(["key"]), counters, rejects)


def send_sorted(
    shard: int, plan: LabelsPlan, table: pa.Table, keys: pa.Table, counters: Counter[str], rejects: list[Reject]
) -> Iterator[Tagged]:
    """Yield a shard's labels in the order of their ids, the number of labels, the `keys`, and a summary."""
    number = plan.shards_before + shard
    counters["truncated"] = int(np.count_nonzero(table["truncated"].to_numpy()))
    facts = {"counters": {plan.name: counters}, "label_sizes": {number: table.num_rows}}
    yield Tagged(SUMMARY, read.report_rejects(LABELS, rejects, plan.files[plans.REJECTS], **facts))
    yield Tagged(read.SIZES, (number, table.num_rows))
    kept = plan.files[plans.LABELS_DONE]
    for tag, to, columns, channel in ((read.ROWS, number, table, kept), (KEYS, shard, keys, plan.exchange)):
        for place in plan.meter.count_bytes(ORDER_LABELS, channel.send([(to, to_record_batch(columns))])):
            yield Tagged(tag, place)
    plan.meter.count(ORDER_LABELS, counters["rows_in"])


# Points find the ids of their labels: mentions meet the keys of labels in lookup tasks, one or more per label shard.


def resolve_labels(groups: Collection, ordered: OrderedLabels, plan: LabelsPlan, seed: int) -> Collection:
    """Look up the mentions of groups (number, blocks): (number, packet with columns `index` and `label_id`).

    index: position among the group's mentions. seed: seed of the hash that chooses a label's shard.
    """
    mentions = groups.flat_map("Route mentions", send_mentions, plan, seed)
    keys = ordered[KEYS].flat_map("Keys to places", copy_keys, plan.shards)
    by_place = groups.flow.join("By place", {"mentions": mentions, "keys": keys})
    return by_place.flat_map("Look up", find_ids, plan, ordered[read.SIZES])


def group_blocks(blocks: Sequence[StagedBlock], shards: int) -> list[tuple[int, BlockGroup]]:
    """Group blocks into (number, blocks), so that groups times label `shards`, the number of packets, is bounded."""
    size = max(1, -(-len(blocks) * shards // _REFERENCES))
    return [(start // size, tuple(blocks[start : start + size])) for start in range(0, len(blocks), size)]


def tasks_per_shard(shards: int) -> int:
    """Return how many lookup tasks serve one shard, n: task p serves shard p // n."""
    return -(-_LOOKUP_TASKS // shards)


def copy_keys(element: tuple[int, Packet], shards: int) -> Iterator[tuple[int, Packet]]:
    """Send a label shard's keys, (shard, packet), to all lookup tasks of the shard: (task, packet)."""
    shard, packet = element
    tasks = tasks_per_shard(shards)
    yield from ((shard * tasks + task, packet) for task in range(tasks))


def send_mentions(
    element: tuple[int, BlockGroup], plan: LabelsPlan, seed: int
) -> Iterator[tuple[int, tuple[int, Packet]]]:
    """Send the mentions of (group number, blocks) to lookup tasks: (task, (group number, packet))."""
    number, blocks = element
    plan.meter.start(SEND)
    mentions = [batch for batch in map(read_mentions, blocks) if batch is not None]
    if not mentions:
        return
    named = pa.concat_batches(mentions)
    batch = pa.record_batch({"index": pa.array(np.arange(named.num_rows)), "key": named["key"]})
    shard = (hash_strings(named["key"], seed) % np.uint64(plan.shards)).astype(np.int64)
    tasks = tasks_per_shard(plan.shards)
    for label_shard, packet in plan.meter.count_bytes(SEND, plan.exchange.send(split_by(batch, shard))):
        yield label_shard * tasks + number % tasks, (number, packet)
    plan.meter.count(SEND, named.num_rows)


def read_mentions(block: StagedBlock) -> pa.RecordBatch | None:
    """Read the mentions of a block; None if the block's points do not name labels by key."""
    return None if block.mentions is None else next(receive([block.mentions]))


def find_ids(
    element: tuple[int, dict[str, Any]], plan: LabelsPlan, sizes: dict[int, int]
) -> Iterator[tuple[int, Packet]]:
    """Look up the mentions in (lookup task, packets by collection), and send the ids back: (group number, packet)."""
    task, packets = element
    plan.meter.start(LOOK_UP)
    (labels,) = receive(packets["keys"])
    first = int(read.first_ids(sizes)[plan.shards_before + task // tasks_per_shard(plan.shards)])
    if "label_id" in labels.schema.names:  # new labels, without an id, are numbered from `first` on
        new = pc.is_null(labels["label_id"]).to_numpy(zero_copy_only=False)
        ids = labels["label_id"].fill_null(0).to_numpy(zero_copy_only=False).copy()
        ids[new] = first + np.arange(np.count_nonzero(new))
    else:
        ids = np.arange(first, first + labels.num_rows)
    received = ((number, batch) for number, packet in packets["mentions"] for batch in receive([packet]))
    for mentions in batch_by_size(received, lambda mention: mention[1].num_rows, _LOOKED_UP):
        found = plan.files[plans.IDS].send(look_up(labels["key"], pa.array(ids), mentions))
        yield from plan.meter.count_bytes(LOOK_UP, found)
        plan.meter.count(LOOK_UP, sum(batch.num_rows for _, batch in mentions))


def look_up(
    labels: pa.Array, ids: pa.Array, mentions: list[tuple[int, pa.RecordBatch]]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """For each (group number, `index` and `key`), yield (group number, `index` and `label_id` of existing labels).

    labels, ids: the keys and the ids of a shard's labels.
    """
    keys = pa.concat_arrays([batch["key"] for _, batch in mentions])
    rank = pc.index_in(keys, value_set=labels)
    start = 0
    for number, batch in mentions:
        ranks = rank.slice(start, batch.num_rows)
        start += batch.num_rows
        resolved = pa.record_batch({"index": batch["index"], "label_id": ids.take(ranks)})
        yield number, resolved.filter(pc.is_valid(ranks))


def known_ids(mentions: int, batches: Iterable[pa.RecordBatch]) -> np.ndarray:
    """Return the label ids of a group's mentions, -1 for unknown labels: int64 [mentions]."""
    ids = np.full(mentions, -1, np.int64)
    for batch in batches:
        ids[batch["index"].to_numpy()] = batch["label_id"].to_numpy()
    return ids


# Points, and pairs, are tokenized and sent to their shards.


def names_of(plan: QueriesPlan) -> tuple[str, str, str]:
    """Return the names of the split's collections: rows, pairs, and labels that older points had, each per shard."""
    return f"rows of {plan.split}", f"pairs of {plan.split}", f"labels before of {plan.split}"


def assemble_queries(
    flow: Flow, plan: QueriesPlan, groups: Mapping[str, list[tuple[BlockGroup, Packet | None]]]
) -> Collection:
    """Assemble one split. Returns a Summary, in which `kept` locates the rows and pairs of each shard.

    groups: per input table, groups of blocks, each with the ids of its mentions, if there are any.
    """
    summaries = []
    for name, table in zip(names_of(plan), (plan.source, PAIRS + plan.source)[: 1 + plan.has_pairs], strict=False):
        made = flow.create(f"Blocks of {name}", groups[table])
        assembled = made.split(f"Assemble {name}", (SUMMARY, read.ROWS), assemble, plan, table, partitions=True)
        summaries += [assembled[SUMMARY], read.store_packets(assembled[read.ROWS], name, plan.files[plans.ROWS])]
    return flatten(summaries)


def assemble(groups: Iterable[tuple[BlockGroup, Packet | None]], plan: QueriesPlan, table: str) -> Iterator[Tagged]:
    """Give label ids to the points or pairs of the input table, and send the rows of the plan's split to their shards.

    Points are tokenized, and have the columns of the plan's `row_schema`; pairs have those of PAIRS_SCHEMA.
    """
    summaries = list[Summary]()
    filters = np.frombuffer(storage.read_sealed(plan.filters), np.int64).reshape(-1, 2) if plan.filters else None

    def rows() -> Iterator[tuple[int, pa.RecordBatch]]:
        for blocks, located in groups:
            plan.meter.start(ENCODE_QUERIES)
            mentions = [read_mentions(block) for block in blocks]
            ends = np.cumsum([0 if named is None else named.num_rows for named in mentions])
            ids = np.split(known_ids(int(ends[-1]), receive(read_locations(located))), ends[:-1])
            for block, named, label_ids in zip(blocks, mentions, ids, strict=True):
                batch = block.read()
                if plan.hash_range != (0.0, 1.0):
                    places = read.places_of(batch, plan.group, plan.seed)
                    batch = batch.filter(pa.array(in_hash_range(places, plan.hash_range)))
                batch, rejects = attach_labels(batch, plan, label_ids, None if named is None else named["key"])
                summaries.append(read.report_rejects(block.table, rejects, plan.files[plans.REJECTS]))
                if table != plan.source:  # pairs
                    batch = batch.filter(pc.equal(pc.list_value_length(batch["label_ids"]), 1))
                    batch = batch.append_column("label_id", batch["label_ids"].flatten().cast(pa.int64()))
                    yield from read.by_shard(batch.select(PAIRS_SCHEMA.names), plan.shards)
                    continue
                batch = read.encode(batch, plan)
                if filters is not None:
                    kind = plan.schema.field("filter_label_ids").type.value_type
                    of_rows = join_pairs(batch["row"].to_numpy(), filters, kind)
                    batch = batch.append_column("filter_label_ids", of_rows)
                yield from read.by_shard(batch.select(plan.row_schema.names), plan.shards)
                plan.meter.count(ENCODE_QUERIES, batch.num_rows)

    sent = plan.meter.count_bytes(ENCODE_QUERIES, send_together(plan.files[plans.ROWS], rows()))
    yield from (Tagged(read.ROWS, packet) for packet in sent)
    yield Tagged(SUMMARY, Summary.sum_of(summaries))


def attach_labels(
    batch: pa.RecordBatch, plan: QueriesPlan, ids: np.ndarray, keys: pa.Array | None
) -> tuple[pa.RecordBatch, list[Reject]]:
    """Return the points that have labels, with `label_ids` of the table's type, and rejects.

    ids int64 [mentions], -1 for unknown labels; keys: of the block's mentions. `own_index`: mention of the point's own
    key. In a format without keys, points already have `label_ids`, which must be below `plan.labels`.
    """
    kind = plan.schema.field("label_ids").type.value_type
    if "own_index" in batch.schema.names:
        own = ids[batch["own_index"].to_numpy()]
        same = parquet.list_array(own[own >= 0], offsets_of((own >= 0).astype(np.int64)), kind)
        batch = batch.append_column("filter_label_ids", same)
    if "label_ids" in batch.schema.names:
        return _in_range(batch, plan, kind)
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


def _in_range(batch: pa.RecordBatch, plan: QueriesPlan, kind: pa.DataType) -> tuple[pa.RecordBatch, list[Reject]]:
    labels = parquet.list_column(pa.table(batch), "label_ids")
    column = batch.schema.get_field_index("label_ids")
    beyond = labels.values >= plan.labels
    rejects: list[Reject] = []
    if beyond.any():
        # Labels are sorted, so the last label of a row is the largest.
        worst = dict(zip(labels.row_of()[beyond].tolist(), labels.values[beyond].tolist(), strict=True))
        wrong = batch.select(["part", "row"]).take(pa.array(list(worst)))
        wrong = wrong.append_column("label", pa.array(list(worst.values())))
        detail = f"label {{label}} does not exist; the labels are 0 to {plan.labels - 1}"
        rejects = reject_rows(wrong, plan.sources, Reason.LABEL_OUT_OF_RANGE, detail)
        batch = batch.filter(pa.array(~np.isin(np.arange(batch.num_rows), list(worst))))
    return batch.set_column(column, "label_ids", batch["label_ids"].cast(pa.list_(kind))), rejects


# Shards of queries are ordered and written; then the labels, with the number of their training points.


class Shard(NamedTuple):
    """One shard of a split: packets that locate rows, pairs, and labels of older points; None if there are none."""

    number: int
    rows: Packet | None
    pairs: Packet | None
    before: Packet | None = None


def write_queries(flow: Flow, plan: QueriesPlan, assembled: Summary) -> dict[str, Collection]:
    """Write one split. Returns `summary` (Summary), and `frequencies` (label shard, packet): counts of points by label.

    If the plan has older shards, also returns `again` (older shard, packet): keys that older points may have, and the
    labels of the new points. assembled: packets of the rows, and the number of labels in each label shard.
    """
    kept = [assembled.kept.get(name, {}) for name in names_of(plan)]
    every = [Shard(number, *(places.get(number) for places in kept)) for number in range(plan.shards)]
    tags, sizes = (read.ROWS, read.SIZES, SUMMARY, FREQUENCIES, REPEATED_KEYS), assembled.label_sizes
    shards = flow.create(f"Shards of {plan.split}", every)
    ordered = shards.split(f"Order {plan.split}", tags, sort_queries, plan, sizes)
    written = ordered[read.ROWS].map(f"Write {plan.split}", finish_queries, plan, ordered[read.SIZES])
    return ordered | {SUMMARY: ordered[SUMMARY] + written}


def sort_queries(shard: Shard, plan: QueriesPlan, label_sizes: dict[int, int]) -> Iterator[Tagged]:
    """Order the rows of a shard, with the labels from pairs. Yields positions, size, label counts and summaries.

    Whole rows are neither read nor sent: `finish_queries` gets each row's position among the gathered rows, and the
    row's labels if they have changed.
    """
    plan.meter.start(ORDER_QUERIES)
    reject_files = plan.files[plans.REJECTS]
    columns = [name for name in plan.row_schema.names if name not in _UNORDERED]
    table = gather(read_locations(shard.rows), plan.row_schema, columns)
    table = table.append_column(_POSITION, pa.array(np.arange(table.num_rows)))
    ordered = order_rows(table)
    rows_in, of_other_splits = ordered.rows.num_rows + ordered.merged + ordered.rejected.num_rows, 0
    table, rejects = ordered.rows, duplicates(ordered, plan.sources)
    if plan.has_pairs:
        pairs = gather(read_locations(shard.pairs), PAIRS_SCHEMA)
        table, unknown = add_pairs(table, pairs["key"].combine_chunks(), pairs["label_id"].to_numpy())
        detail = "the query {key} is not among the points"
        lost_pairs = reject_rows(pairs.filter(pa.array(unknown)), plan.sources, Reason.UNKNOWN_QUERY, detail)
        yield Tagged(SUMMARY, read.report_rejects(f"pairs/{plan.source}", lost_pairs, reject_files))
        table, lost = without_labels(table, plan.sources)
        if plan.shared_points:
            of_other_splits = len(lost)
        else:
            rejects += lost
    if shard.before is not None:
        before = gather(read_locations(shard.before), BEFORE_SCHEMA)
        table, _ = add_pairs(table, before["key"].combine_chunks(), before["label_id"].to_numpy())
    if plan.same_key:
        table = drop_positive_filters(table)
    lengths = {name: len(parquet.list_column(table, name).values) for name in LISTS if name in table.column_names}
    counters = Counter(
        rows_in=rows_in - of_other_splits,
        rows_merged=ordered.merged,
        rows_out=table.num_rows,
        truncated=int(np.count_nonzero(table["truncated"].to_numpy())),
        labels=lengths["label_ids"],
        labels_merged=int(table["merged"].to_numpy().sum()),
    )
    if "filter_label_ids" in lengths:
        counters["filter_pairs_applied"] = lengths["filter_label_ids"]
    yield Tagged(SUMMARY, read.report_rejects(plan.source, rejects, reject_files, counters={plan.name: counters}))
    yield Tagged(read.SIZES, (shard.number, table.num_rows))
    counts = count_labels(parquet.list_column(table, "label_ids").values, read.first_ids(label_sizes))
    yield from (Tagged(FREQUENCIES, place) for place in plan.exchange.send(counts))
    repeated = route_keys(to_record_batch(table.select(["hash", "key", "label_ids"])), plan.older)
    yield from (Tagged(REPEATED_KEYS, place) for place in plan.exchange.send(repeated))
    differ = ordered.merged or plan.has_pairs or plan.same_key or shard.before is not None
    changed = table.select([_POSITION, *(lengths if differ else ())])
    placed = plan.exchange.send([(shard.number, to_record_batch(changed))])
    for _, packet in plan.meter.count_bytes(ORDER_QUERIES, placed):
        yield Tagged(read.ROWS, (shard, packet))
    plan.meter.count(ORDER_QUERIES, rows_in)


def finish_queries(element: tuple[Shard, Packet], plan: QueriesPlan, sizes: dict[int, int]) -> Summary:
    """Write a shard from (shard, ordered positions of its rows); `sizes` are the rows per shard, for the first id."""
    shard, packet = Shard(*element[0]), element[1]
    plan.meter.start(WRITE_QUERIES)
    (order,) = receive([packet])
    columns = [name for name in plan.schema.names if name not in ("query_id", *order.schema.names)]
    table = gather(read_locations(shard.rows), plan.row_schema, columns).take(order[_POSITION])
    for name in order.schema.names[1:]:
        table = table.append_column(name, order[name])
    first = int(read.first_ids(sizes)[shard.number])
    ids = pa.array(np.arange(first, first + table.num_rows, dtype=np.int64))
    table = table.append_column("query_id", ids).select(plan.schema.names).cast(plan.schema)
    entry = shards.write_shard(plan.table, shard.number, plan.shards, table, plan.row_group_rows, plan.sink)
    plan.meter.count(WRITE_QUERIES, table.num_rows, entry.bytes)
    return Summary(shards={plan.name: (entry,)}, counters={plan.name: count_tokens(table)})


def write_labels(counts: Collection, plan: LabelsPlan, ordered: Summary) -> Collection:
    """Join the labels in `ordered` with their training counts (shard, packet), and write them. Returns Summary."""
    labels = read.load_packets(counts.flow, ordered, LABELS)
    joined = counts.flow.join("Join counts", {"rows": labels, "counts": counts})
    return joined.map("Write labels", finish_labels, plan, ordered.label_sizes)


def finish_labels(element: tuple[int, dict[str, Any]], plan: LabelsPlan, sizes: dict[int, int]) -> Summary:
    """Write a shard from (shard, packets by collection): ordered labels, and label counts in any order."""
    shard, packets = element
    plan.meter.start(WRITE_LABELS)
    table = gather(packets["rows"], plan.row_schema)
    first, number = int(read.first_ids(sizes)[shard]), shard - plan.shards_before
    frequency = sum_counts(receive(packets["counts"]), first, table.num_rows)
    table = table.append_column("label_id", pa.array(np.arange(first, first + table.num_rows)))
    table = table.append_column("frequency", pa.array(frequency))
    table = table.select(plan.schema.names).cast(plan.schema)
    entry = shards.write_shard(plan.table, number, plan.shards, table, plan.row_group_rows, plan.sink)
    plan.meter.count(WRITE_LABELS, table.num_rows, entry.bytes)
    counters = count_tokens(table)
    counters.update(rows_out=table.num_rows, without_training_points=int((frequency == 0).sum()))
    return Summary(shards={plan.name: (entry,)}, counters={plan.name: counters})


def count_labels(label_ids: np.ndarray, first: np.ndarray) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Count `label_ids` [V]: yield (shard, columns `label_id` and `count`); shard s has ids [first[s], first[s + 1]).

    first: int64 [shards + 1]. No worker has the counts of all labels in memory.
    """
    ids, counts = np.unique(label_ids, return_counts=True)
    batch = pa.record_batch({"label_id": pa.array(ids, pa.int64()), "count": pa.array(counts, pa.int64())})
    return split_by(batch, np.searchsorted(first, ids, side="right") - 1)


def sum_counts(batches: Iterable[pa.RecordBatch], first: int, labels: int) -> np.ndarray:
    """Sum the numbers of training points of the labels [first, first + labels): int64 [labels]."""
    total = np.zeros(labels, np.int64)
    for batch in batches:
        np.add.at(total, batch["label_id"].to_numpy() - first, batch["count"].to_numpy())
    return total


def count_tokens(table: pa.Table) -> Counter[str]:
    """Count tokens, features and empty rows in finished rows; a row that has only a vector is not empty."""
    counts: Counter[str] = Counter()
    counted = {"input_ids": "tokens", "feature_ids": "features"}
    empty = np.full(table.num_rows, not counted.keys().isdisjoint(table.column_names))
    for name in (name for name in counted if name in table.column_names):
        lengths = parquet.list_column(table, name).counts
        counts[counted[name]] = int(lengths.sum())
        empty &= lengths == 0
    counts["empty_texts"] = int(empty.sum())
    return counts


# Rows with the same key, and lists of labels.


class OrderedRows(NamedTuple):
    """Rows in the order of (hash, key), with distinct keys. merged: number of rows that were merged into other rows.

    rejected, kept: columns part, row and key of each rejected row, and of the row that has the same key instead.
    """

    rows: pa.Table
    merged: int
    rejected: pa.Table
    kept: pa.Table


def order_rows(rows: pa.Table) -> OrderedRows:
    """Sort rows [N] by hash, key, content, part and row. The first row of each key stays.

    Later rows with the same content are merged into it, and their LISTS united; rows with other content are rejected.
    """
    given = rows.combine_chunks()
    by = [given[name].to_numpy() for name in ("row", "part", "content", "hash")]  # the last decides first
    rows = given.take(pa.array(np.lexsort(by))).combine_chunks()
    tied, same = _ties(rows)
    if not same.all():  # two keys have the same hash: this is rare, so a slow method suffices
        names = ("hash", "key", "content", "part", "row")
        rows = given.sort_by([(name, "ascending") for name in names]).combine_chunks()
        tied, same = _ties(rows)
    place, count = rows.select(["part", "row", "key"]), rows.num_rows
    starts = np.ones(count, bool)  # marks the first row of each key
    starts[tied[same] + 1] = False
    if starts.all():
        return OrderedRows(rows, 0, place.slice(0, 0), place.slice(0, 0))
    first = np.flatnonzero(starts)
    group = np.cumsum(starts) - 1
    content = rows["content"].to_numpy()
    merges = content == content[first[group]]
    other = np.flatnonzero(~merges)
    kept = rows.take(pa.array(first))
    for name in LISTS:
        if name in rows.column_names:
            values, offsets = parquet.list_column(rows, name)
            owner = np.repeat(group, np.diff(offsets))
            take = np.repeat(merges, np.diff(offsets))
            united = unite(owner[take], values[take], len(first), rows.schema.field(name).type.value_type)
            kept = kept.set_column(kept.schema.get_field_index(name), rows.schema.field(name), united)
    merged = count - len(first) - len(other)
    return OrderedRows(kept, merged, place.take(pa.array(other)), place.take(pa.array(first[group[other]])))


def _ties(rows: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows with the same hash as the next row, and which of these rows also have the same key."""
    hashes, keys = rows["hash"].to_numpy(), rows["key"]
    tied = np.flatnonzero(hashes[1:] == hashes[:-1])
    same = pc.equal(keys.take(pa.array(tied)), keys.take(pa.array(tied + 1)))
    return tied, same.to_numpy(zero_copy_only=False)


def unite(owner: np.ndarray, ids: np.ndarray, rows: int, kind: pa.DataType) -> pa.ListArray:
    """Turn unordered pairs (owner[i], ids[i]) into a list column with the sorted, distinct ids of each row."""
    stride = 1 + int(ids.max(initial=0))
    owner, ids = np.divmod(np.unique(owner * stride + ids.astype(np.int64)), stride)
    return parquet.list_array(ids, offsets_of(np.bincount(owner, minlength=rows)), kind)


def add_pairs(rows: pa.Table, keys: pa.Array, ids: np.ndarray) -> tuple[pa.Table, np.ndarray]:
    """Add the labels `ids` [P] to the rows with the keys `keys` [P]; return rows, and bool [P] for missing keys."""
    column = rows["key"].combine_chunks()
    places = pc.index_in(keys, value_set=column).fill_null(-1).to_numpy()
    values, offsets = parquet.list_column(rows, "label_ids")
    owner = np.concatenate([np.repeat(np.arange(rows.num_rows), np.diff(offsets)), places[places >= 0]])
    number, field = rows.schema.get_field_index("label_ids"), rows.schema.field("label_ids")
    united = unite(owner, np.concatenate([values, ids[places >= 0]]), rows.num_rows, field.type.value_type)
    return rows.set_column(number, field, united), places < 0


def join_pairs(rows: np.ndarray, pairs: np.ndarray, type: pa.DataType) -> pa.ListArray:
    """Return the labels of `rows` [B] in the sorted `pairs` (row, label), int64 [F, 2], as a list column of `type`."""
    of_rows = Ragged(pairs[:, 1], np.searchsorted(pairs[:, 0], np.arange(int(rows.max(initial=-1)) + 2)))
    return parquet.list_array(*of_rows.take(rows), type)


def drop_positive_filters(rows: pa.Table) -> pa.Table:
    """Remove from `filter_label_ids` the labels that are positives of the row."""
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


def duplicates(ordered: OrderedRows, sources: Mapping[int, str]) -> list[Reject]:
    """Return rejects for the rows that `order_rows` rejected."""
    rejects = []
    for row, kept in zip(ordered.rejected.to_pylist(), ordered.kept.to_pylist(), strict=True):
        place = f"{sources[kept['part']]}, line {kept['row'] + 1}"
        detail = f"the key {ascii(row['key'])[:80]} is already used by {place}, with different content"
        rejects.append(Reject(sources[row["part"]], row["row"] + 1, Reason.DUPLICATE_KEY, detail))
    return rejects
