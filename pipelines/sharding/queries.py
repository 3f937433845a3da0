"""Build the queries of one split: add label ids and tokens to blocks, then order, number and write shards."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

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
    to_record_batch,
)
from pipelines.formats.base import PAIRS, Reason, Reject
from pipelines.job import SUMMARY, StagedBlock, Summary
from pipelines.sharding import resume, rows
from pipelines.sharding.labels import count_labels, count_tokens, duplicates, known_ids, read_mentions
from pipelines.sharding.plans import QueriesPlan
from pipelines.sharding.steps import (
    ROWS,
    SIZES,
    by_shard,
    encode,
    first_ids,
    open_column_tokenizer,
    report_rejects,
    store_packets,
)
from pipelines.sharding.versions.earlier import route_keys
from schemas import storage
from schemas.hashing import in_hash_range
from schemas.shard_files import parquet, shards

ENCODE = "tokenize"  # step
PAIRS_SCHEMA = pa.schema(
    [("hash", pa.uint64()), ("part", pa.int32()), ("row", pa.int64()), ("key", pa.string()), ("label_id", pa.int64())]
)

BEFORE_SCHEMA = pa.schema([("key", pa.string()), ("label_id", pa.int64())])


class ResolvedBlocks(NamedTuple):
    """Blocks of an input table. `ids`: ids of the labels that the blocks name; None if the blocks name no labels."""

    blocks: tuple[StagedBlock, ...]
    ids: Packet | None


def assemble_queries(flow: Flow, plan: QueriesPlan, groups: Mapping[str, list[ResolvedBlocks]]) -> Collection:
    """Assemble one split. Returns a Summary, in which `kept` locates the rows and pairs of each shard.

    groups: groups of blocks, per input table.
    """
    sources = (plan.source, PAIRS + plan.source) if plan.has_pairs else (plan.source,)
    summaries = []
    for name, source, assemble in zip(names_of(plan), sources, (assemble_points, assemble_pairs), strict=False):
        made = flow.create(f"Blocks of {name}", groups[source])
        assembled = made.split(f"Assemble {name}", (SUMMARY, ROWS), assemble, plan, partitions=True)
        summaries += [assembled[SUMMARY], store_packets(assembled[ROWS], name, plan.files[resume.ROWS])]
    return flatten(summaries)


def names_of(plan: QueriesPlan) -> tuple[str, str, str]:
    """Return the names of the split's collections: rows, pairs, and labels before, each per shard."""
    return f"rows of {plan.split}", f"pairs of {plan.split}", f"labels before of {plan.split}"


def assemble_points(groups: Iterable[ResolvedBlocks], plan: QueriesPlan) -> Iterator[Tagged]:
    """Tokenize the points in groups of blocks, and send rows with the plan's `row_schema` to their shards."""
    column_tokenizer = open_column_tokenizer(plan)
    pairs = np.frombuffer(storage.read_sealed(plan.filters), np.int64).reshape(-1, 2) if plan.filters else None

    def finish(batch: pa.RecordBatch) -> pa.RecordBatch:
        batch = encode(batch, plan, column_tokenizer)
        if pairs is not None:
            kind = plan.schema.field("filter_label_ids").type.value_type
            filters = rows.join_pairs(batch["row"].to_numpy(), pairs, kind)
            batch = batch.append_column("filter_label_ids", filters)
        return batch.select(plan.row_schema.names)

    yield from _assemble(groups, plan, finish, plan.meter.count)


def assemble_pairs(groups: Iterable[ResolvedBlocks], plan: QueriesPlan) -> Iterator[Tagged]:
    """Add label ids to pairs, and send the pairs to their shards, with the columns of the schema PAIRS."""

    def finish(batch: pa.RecordBatch) -> pa.RecordBatch:
        batch = batch.filter(pc.equal(pc.list_value_length(batch["label_ids"]), 1))
        labels = batch["label_ids"].flatten().cast(pa.int64())
        return batch.append_column("label_id", labels).select(PAIRS_SCHEMA.names)

    yield from _assemble(groups, plan, finish, lambda step, rows: None)


def _assemble(
    groups: Iterable[ResolvedBlocks],
    plan: QueriesPlan,
    finish: Callable[[pa.RecordBatch], pa.RecordBatch],
    count: Callable[[str, int], None],
) -> Iterator[Tagged]:
    """Add `label_ids` to rows, send the results of `finish` for many blocks at a time, and summarize rejects."""
    summaries: list[Summary] = []

    def parts() -> Iterator[tuple[int, pa.RecordBatch]]:
        for group in groups:
            plan.meter.start(ENCODE)
            for block, batch, rejected in _with_labels(ResolvedBlocks(*group), plan):
                summaries.append(report_rejects(block.table, rejected, plan.files[resume.REJECTS]))
                finished = finish(batch)
                yield from by_shard(finished, plan.shards)
                count(ENCODE, finished.num_rows)

    sent = plan.meter.count_bytes(ENCODE, send_together(plan.files[resume.ROWS], parts()))
    yield from (Tagged(ROWS, packet) for packet in sent)
    yield Tagged(SUMMARY, Summary.sum_of(summaries))


def _with_labels(
    group: ResolvedBlocks, plan: QueriesPlan
) -> Iterator[tuple[StagedBlock, pa.RecordBatch, list[Reject]]]:
    """Yield each block with its rejects, and its rows that belong to the plan's split, with label ids."""
    mentions = [read_mentions(block) for block in group.blocks]
    ends = np.cumsum([0 if named is None else named.num_rows for named in mentions])
    ids = np.split(known_ids(int(ends[-1]), receive(read_locations(group.ids))), ends[:-1])
    for block, named, label_ids in zip(group.blocks, mentions, ids, strict=True):
        batch = block.read()
        if plan.hash_range != (0.0, 1.0):
            batch = batch.filter(pa.array(in_hash_range(batch["hash"].to_numpy(), plan.hash_range)))
        yield block, *rows.attach_labels(batch, plan, label_ids, None if named is None else named["key"])


FREQUENCIES, REPEATED_KEYS = "frequencies", "again"
ORDER, WRITE = "order", "write"  # steps
_POSITION = "position"
_UNORDERED = ("input_ids", "text", "feature_ids", "feature_values", "dense")  # columns that do not affect the order


class Shard(NamedTuple):
    """One shard of a split: packets that locate rows, pairs, and labels of older points; None if there are none."""

    number: int
    rows: Packet | None
    pairs: Packet | None
    before: Packet | None = None

    def gather(self, plan: QueriesPlan, columns: list[str]) -> pa.Table:
        """Return `columns` of the shard's rows, always in the same order."""
        return gather(read_locations(self.rows), plan.row_schema, columns)


def write_queries(flow: Flow, plan: QueriesPlan, assembled: Summary) -> dict[str, Collection]:
    """Write one split. Returns the collections `summary` (Summary) and `frequencies` (label shard, packet).

    If the plan has older shards, also returns `again` (older shard, packet): keys that older points may have, and the
    labels of the new points.
    assembled: the locations of the rows, and the number of labels in each label shard.
    """
    kept = [assembled.kept.get(name, {}) for name in names_of(plan)]
    every = [Shard(number, *(places.get(number) for places in kept)) for number in range(plan.shards)]
    tags, sizes = (ROWS, SIZES, SUMMARY, FREQUENCIES, REPEATED_KEYS), assembled.label_sizes
    shards = flow.create(f"Shards of {plan.split}", every)
    ordered = shards.split(f"Order {plan.split}", tags, order_shard, plan, sizes)
    written = ordered[ROWS].map(f"Write {plan.split}", write_shard, plan, ordered[SIZES])
    return {
        SUMMARY: ordered[SUMMARY] + written,
        FREQUENCIES: ordered[FREQUENCIES],
        REPEATED_KEYS: ordered[REPEATED_KEYS],
    }


def order_shard(shard: Shard, plan: QueriesPlan, label_sizes: dict[int, int]) -> Iterator[Tagged]:
    """Order the rows of a shard, with the labels from pairs. Yields positions, size, label counts and summaries.

    Whole rows are not written again. Only each row's position among the gathered rows is sent, and the row's labels if
    the labels have changed.
    """
    plan.meter.start(ORDER)
    staged = plan.files[resume.REJECTS]
    table = shard.gather(plan, [name for name in plan.row_schema.names if name not in _UNORDERED])
    table = table.append_column(_POSITION, pa.array(np.arange(table.num_rows)))
    ordered = rows.order(table)
    rows_in, others = ordered.rows.num_rows + ordered.merged + ordered.rejected.num_rows, 0
    table, rejects = ordered.rows, duplicates(ordered, plan.sources)
    if plan.has_pairs:
        pairs = gather(read_locations(shard.pairs), PAIRS_SCHEMA)
        table, unknown = rows.add_pairs(table, pairs["key"].combine_chunks(), pairs["label_id"].to_numpy())
        lost_pairs = rows.reject_rows(
            pairs.filter(pa.array(unknown)),
            plan.sources,
            Reason.UNKNOWN_QUERY,
            "the query {key} is not among the points",
        )
        yield Tagged(SUMMARY, report_rejects(f"pairs/{plan.source}", lost_pairs, staged))
        table, lost = rows.without_labels(table, plan.sources)
        if plan.shared_points:
            others = len(lost)
        else:
            rejects += lost
    if shard.before is not None:
        before = gather(read_locations(shard.before), BEFORE_SCHEMA)
        table, _ = rows.add_pairs(table, before["key"].combine_chunks(), before["label_id"].to_numpy())
    if plan.same_key:
        table = rows.without_positives(table)
    counters = Counter(rows_in=rows_in - others, rows_merged=ordered.merged)
    counters.update(_count(table))
    yield Tagged(SUMMARY, report_rejects(plan.source, rejects, staged, counters={plan.name: counters}))
    yield Tagged(SIZES, (shard.number, table.num_rows))
    counts = count_labels(parquet.list_column(table, "label_ids").values, first_ids(label_sizes))
    for place in plan.exchange.send(counts):
        yield Tagged(FREQUENCIES, place)
    repeated = to_record_batch(table.select(["hash", "key", "label_ids"]))
    for place in plan.exchange.send(route_keys(repeated, plan.older)):
        yield Tagged(REPEATED_KEYS, place)
    differ = ordered.merged or plan.has_pairs or plan.same_key or shard.before is not None
    changed = [name for name in rows.LISTS if name in table.column_names and differ]
    placed = plan.exchange.send([(shard.number, to_record_batch(table.select([_POSITION, *changed])))])
    for _, packet in plan.meter.count_bytes(ORDER, placed):
        yield Tagged(ROWS, (shard, packet))
    plan.meter.count(ORDER, rows_in)


def write_shard(element: tuple[Shard, Packet], plan: QueriesPlan, sizes: dict[int, int]) -> Summary:
    """Write a shard from (shard, ordered positions of its rows); `sizes` are the rows per shard, for the first id."""
    shard, packet = Shard(*element[0]), element[1]
    plan.meter.start(WRITE)
    (order,) = receive([packet])
    gathered = [name for name in plan.schema.names if name not in ("query_id", *order.schema.names)]
    table = shard.gather(plan, gathered).take(order[_POSITION])
    for name in order.schema.names[1:]:
        table = table.append_column(name, order[name])
    first = int(first_ids(sizes)[shard.number])
    ids = pa.array(np.arange(first, first + table.num_rows, dtype=np.int64))
    table = table.append_column("query_id", ids).select(plan.schema.names).cast(plan.schema)
    entry = shards.write_shard(plan.table, shard.number, plan.shards, table, plan.row_group_rows, plan.sink)
    plan.meter.count(WRITE, table.num_rows, entry.bytes)
    return Summary(shards={plan.name: (entry,)}, counters={plan.name: count_tokens(table)})


def _count(table: pa.Table) -> Counter[str]:
    """Return the manifest's counters for ordered rows, except the counters for texts."""
    counts = Counter(
        rows_out=table.num_rows,
        truncated=int(np.count_nonzero(table["truncated"].to_numpy())),
        labels=len(parquet.list_column(table, "label_ids").values),
        labels_merged=int(table["merged"].to_numpy().sum()),
    )
    if "filter_label_ids" in table.column_names:
        counts["filter_pairs_applied"] = len(parquet.list_column(table, "filter_label_ids").values)
    return counts
