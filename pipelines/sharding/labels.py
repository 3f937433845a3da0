"""Order labels by id, look up the labels that points name, count training points per label, and write the labels.

No process has all labels in memory: each shard looks up the keys that it receives, and sends the ids back to the
blocks. A label's id is its rank in its shard plus the number of labels in all earlier shards. Blocks are grouped, so
that at most _REFERENCES references to packets are exchanged in each direction, for any number of blocks and shards. If
there are few shards, several lookup tasks serve the same shard, and each task serves different groups of blocks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.flow import Collection, Flow, Packet, Tagged, gather, receive, split_by, to_record_batch
from pipelines.formats.base import LABELS, Reason, Reject
from pipelines.job import SUMMARY, StagedBlock, Summary
from pipelines.sharding import resume, rows
from pipelines.sharding.plans import LabelsPlan
from pipelines.sharding.steps import (
    ROWS,
    SIZES,
    by_shard,
    encode,
    first_ids,
    load_packets,
    open_column_tokenizer,
    report_rejects,
    store_packets,
)
from schemas.hashing import hash_strings
from schemas.shard_files import parquet, shards
from schemas.sizes import batch_by_size

BlockGroup = tuple[StagedBlock, ...]

KEYS = "keys"
ENCODE, ORDER, WRITE = "tokenize labels", "order labels", "write labels"  # steps
_REFERENCES = 1 << 17  # some runners keep references in the launching process
_LOOKED_UP = 1 << 20  # keys per call: Arrow builds the hash table of the shard's keys again in each call
_LOOKUP_TASKS = 16  # minimum number of tasks that look up keys
SEND, LOOK_UP = "send keys of labels", "find labels"  # steps that count keys as rows


Ordered = dict[str, Collection]  # labels by shard, by tag


def order_labels(flow: Flow, plan: LabelsPlan, blocks: list[StagedBlock]) -> Ordered:
    """Order labels by id: by (hash, key), or by row in a format without keys.

    Returns the collections `rows` and `keys` (shard, packet), `sizes` (shard, number of labels), and `summary`. In a
    version, the shards of earlier labels have the lowest numbers, and the shards of new labels follow. `keys` are
    sharded by the hash of the key, and contain the ids of labels that already have ids.
    """
    encoded = flow.create("Blocks of labels", blocks).flat_map("Encode labels", encode_block, plan)
    every = flow.create("Shards of labels", [(shard, None) for shard in range(plan.shards)])  # even without labels
    joined = flow.join("Labels by shard", {"rows": encoded, "every": every})
    return joined.split("Order labels", (ROWS, KEYS, SIZES, SUMMARY), order_shard, plan)


def keep_labels(ordered: Ordered, plan: LabelsPlan) -> Collection:
    """Store the rows and sizes of ordered labels for the next flow. Returns Summary."""
    sizes = ordered[SIZES].map("Sizes of labels", _kept_size)
    return ordered[SUMMARY] + sizes + store_packets(ordered[ROWS], LABELS, plan.files[resume.LABELS])


def _kept_size(element: tuple[int, int]) -> Summary:
    return Summary(label_sizes=dict([element]))


def write_labels(counts: Collection, plan: LabelsPlan, ordered: Summary) -> Collection:
    """Join the labels in `ordered` with their training counts (shard, packet), and write them. Returns Summary."""
    joined = counts.flow.join("Join counts", {"rows": load_packets(counts.flow, ordered, LABELS), "counts": counts})
    return joined.map("Write labels", write_shard, plan, ordered.label_sizes)


def encode_block(block: StagedBlock, plan: LabelsPlan) -> Iterator[tuple[int, Packet]]:
    """Tokenize the labels of a block and send them to their shards: (shard, packet)."""
    plan.meter.start(ENCODE)
    batch = encode(block.read(), plan, open_column_tokenizer(plan)).select(plan.row_schema.names)
    if plan.keyed:
        parts = by_shard(batch, plan.shards)
    else:
        parts = split_by(batch, batch["row"].to_numpy() // plan.shard_rows)
    yield from plan.meter.count_bytes(ENCODE, plan.exchange.send(parts))
    plan.meter.count(ENCODE, batch.num_rows)


def order_shard(element: tuple[int, dict[str, Any]], plan: LabelsPlan) -> Iterator[Tagged]:
    """Order the labels in the parts of (shard, parts); yield the shard's rows, keys, size and summary."""
    shard, parts = element
    plan.meter.start(ORDER)
    table = gather(parts["rows"], plan.row_schema)
    rejects: list[Reject] = []
    counters: Counter[str] = Counter(rows_in=table.num_rows)
    if plan.keyed:
        ordered = rows.order(table)
        table = ordered.rows
        counters["rows_merged"] = ordered.merged
        rejects = duplicates(ordered, plan.sources)
    else:
        table = table.sort_by("row")
    yield from send_ordered(shard, plan, table, table.select(["key"]), counters, rejects)


def send_ordered(
    shard: int, plan: LabelsPlan, table: pa.Table, keys: pa.Table, counters: Counter[str], rejects: list[Reject]
) -> Iterator[Tagged]:
    """Yield a shard's labels in the order of their ids, the number of labels, the `keys`, and a summary."""
    number = plan.shards_before + shard
    counters["truncated"] = int(np.count_nonzero(table["truncated"].to_numpy()))
    yield Tagged(SUMMARY, report_rejects(LABELS, rejects, plan.files[resume.REJECTS], counters={plan.name: counters}))
    yield Tagged(SIZES, (number, table.num_rows))
    staged = plan.files[resume.LABELS]
    for tag, to, columns, channel in ((ROWS, number, table, staged), (KEYS, shard, keys, plan.exchange)):
        for place in plan.meter.count_bytes(ORDER, channel.send([(to, to_record_batch(columns))])):
            yield Tagged(tag, place)
    plan.meter.count(ORDER, counters["rows_in"])


def write_shard(element: tuple[int, dict[str, Any]], plan: LabelsPlan, sizes: dict[int, int]) -> Summary:
    """Write a shard's file from (shard, parts); the parts are ordered labels, and label counts in any order."""
    shard, parts = element
    plan.meter.start(WRITE)
    table = gather(parts["rows"], plan.row_schema)
    first, number = int(first_ids(sizes)[shard]), shard - plan.shards_before
    frequency = sum_counts(receive(parts["counts"]), first, table.num_rows)
    table = table.append_column("label_id", pa.array(np.arange(first, first + table.num_rows)))
    table = table.append_column("frequency", pa.array(frequency))
    table = table.select(plan.schema.names).cast(plan.schema)
    entry = shards.write_shard(plan.table, number, plan.shards, table, plan.row_group_rows, plan.sink)
    plan.meter.count(WRITE, table.num_rows, entry.bytes)
    counters = count_tokens(table)
    counters.update(rows_out=table.num_rows, without_training_points=int((frequency == 0).sum()))
    return Summary(shards={plan.name: (entry,)}, counters={plan.name: counters})


def duplicates(ordered: rows.Ordered, sources: Mapping[int, str]) -> list[Reject]:
    """Return rejects for rows that have the same key as a retained row, but different content."""
    rejects = []
    for row, kept in zip(ordered.rejected.to_pylist(), ordered.kept.to_pylist(), strict=True):
        place = f"{sources[kept['part']]}, line {kept['row'] + 1}"
        detail = f"the key {ascii(row['key'])[:80]} is already used by {place}, with different content"
        rejects.append(Reject(sources[row["part"]], row["row"] + 1, Reason.DUPLICATE_KEY, detail))
    return rejects


def count_labels(label_ids: np.ndarray, first: np.ndarray) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Count `label_ids` [V]: yield (shard, columns `label_id` and `count`); shard s has ids [first[s], first[s + 1]).

    first: int64 [shards + 1]. No worker has the counts of all labels in memory.
    """
    ids, counts = np.unique(label_ids, return_counts=True)
    batch = pa.record_batch({"label_id": pa.array(ids, pa.int64()), "count": pa.array(counts, pa.int64())})
    return split_by(batch, np.searchsorted(first, ids, side="right") - 1)


def sum_counts(parts: Iterable[pa.RecordBatch], first: int, labels: int) -> np.ndarray:
    """Sum the numbers of training points of the labels [first, first + labels): int64 [labels]."""
    total = np.zeros(labels, np.int64)
    for part in parts:
        np.add.at(total, part["label_id"].to_numpy() - first, part["count"].to_numpy())
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


def ids_of_table(table: str) -> str:
    """Return the name of the collection that contains, per group of an input table's blocks, the label ids."""
    return f"ids of {table}"


def group_blocks(blocks: Sequence[StagedBlock], shards: int) -> list[tuple[int, BlockGroup]]:
    """Group blocks into (number, blocks), with larger groups if there are many blocks and label `shards`."""
    size = max(1, -(-len(blocks) * shards // _REFERENCES))
    return [(start // size, tuple(blocks[start : start + size])) for start in range(0, len(blocks), size)]


def tasks_per_shard(shards: int) -> int:
    """Return how many lookup tasks serve one shard, n: task p serves shard p // n."""
    return -(-_LOOKUP_TASKS // shards)


def resolve_labels(groups: Collection, ordered: Ordered, plan: LabelsPlan, seed: int) -> Collection:
    """Look up the labels that groups (number, blocks) name: (number, packet with columns `index` and `label_id`).

    The packets are in files. seed: seed of the hash that chooses a label's shard.
    """
    mentions = groups.flat_map("Route mentions", route_mentions, plan, seed)
    keys = ordered[KEYS].flat_map("Keys to places", copy_keys, plan.shards)
    by_place = groups.flow.join("By place", {"mentions": mentions, "keys": keys})
    return by_place.flat_map("Look up", resolve_shard, plan, ordered[SIZES])


def copy_keys(element: tuple[int, Packet], shards: int) -> Iterator[tuple[int, Packet]]:
    """Send a label shard's keys, (shard, packet), to all lookup tasks of the shard: (task, packet)."""
    shard, packet = element
    tasks = tasks_per_shard(shards)
    yield from ((shard * tasks + task, packet) for task in range(tasks))


def route_mentions(
    element: tuple[int, BlockGroup], plan: LabelsPlan, seed: int
) -> Iterator[tuple[int, tuple[int, Packet]]]:
    """Send the label keys in (group number, blocks) to lookup tasks: (task, (group number, packet))."""
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
    """Read the label keys in a block; None if the block's points do not name labels by key."""
    return None if block.mentions is None else next(receive([block.mentions]))


def resolve_shard(
    element: tuple[int, dict[str, Any]], plan: LabelsPlan, sizes: dict[int, int]
) -> Iterator[tuple[int, Packet]]:
    """Look up the label keys in (lookup task, parts), and send the ids back: (group number, packet)."""
    task, parts = element
    plan.meter.start(LOOK_UP)
    (labels,) = receive(parts["keys"])
    first = int(first_ids(sizes)[plan.shards_before + task // tasks_per_shard(plan.shards)])
    ids = ids_of(labels, first)
    received = ((number, batch) for number, packet in parts["mentions"] for batch in receive([packet]))
    for mentions in batch_by_size(received, lambda mention: mention[1].num_rows, _LOOKED_UP):
        found = plan.files[resume.IDS].send(look_up(labels["key"], ids, mentions))
        yield from plan.meter.count_bytes(LOOK_UP, found)
        plan.meter.count(LOOK_UP, sum(batch.num_rows for _, batch in mentions))


def ids_of(labels: pa.RecordBatch, first: int) -> pa.Array:
    """Return the ids of a shard's labels: the values of `label_id`, or numbers from `first` on for new labels."""
    if "label_id" not in labels.schema.names:
        return pa.array(np.arange(first, first + labels.num_rows))
    new = pc.is_null(labels["label_id"]).to_numpy(zero_copy_only=False)
    ids = labels["label_id"].fill_null(0).to_numpy(zero_copy_only=False).copy()
    ids[new] = first + np.arange(np.count_nonzero(new))
    return pa.array(ids)


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
