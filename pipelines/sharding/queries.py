"""Queries of one split, shard by shard: order, number, write."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.pvalue import AsDict, PCollection, TaggedOutput

from pipelines.common.exchange import Exchange, Files, Packet, gather, one_batch, read_places, receive
from pipelines.common.summary import SUMMARY, Summary
from pipelines.formats.rejects import Reason
from pipelines.sharding import points, rows
from pipelines.sharding.assemble import PAIRS, pairs_of, rows_of
from pipelines.sharding.labels import count_labels, count_tokens, duplicates
from pipelines.sharding.plan import QueriesPlan
from pipelines.sharding.steps import ROWS, SIZES, first_ids, reported
from pipelines.sharding.versions.earlier import route_keys
from schemas.shard_files import parquet, shards

FREQUENCIES, AGAIN = "frequencies", "again"
ORDER, WRITE = "order", "write"  # steps
_POSITION = "position"
_UNORDERED = ("input_ids", "text", "feature_ids", "feature_values")  # columns without a say in the order


class Shard(NamedTuple):
    """One shard of a split: where its rows are, and its pairs; None where it has none."""

    number: int
    rows: Packet | None
    pairs: Packet | None

    def gather(self, plan: QueriesPlan, columns: list[str]) -> pa.Table:
        """Return `columns` of its rows, in the same order every time."""
        return gather(read_places(self.rows), plan.row_schema, columns)


@beam.ptransform_fn
def write_queries(
    pipeline: Any,
    plan: QueriesPlan,
    assembled: Summary,
    exchange: Exchange,
    staged: Files,
) -> dict[str, PCollection]:
    """Write one split; yields the collections `summary` (Summary) and `frequencies` (label shard, packet).

    Besides `again` (older shard, packet): keys that older points may have, where the plan names any. assembled: where
    the rows are, and the number of labels of each of their shards.
    """
    rows, pairs = (assembled.kept.get(name, {}) for name in (rows_of(plan), pairs_of(plan)))
    every = [Shard(number, rows.get(number), pairs.get(number)) for number in range(plan.shards)]
    order = beam.FlatMap(order_shard, plan, exchange, staged, assembled.label_sizes)
    ordered = (
        pipeline
        | "Shards" >> beam.Create(every)
        | "Order" >> order.with_outputs(ROWS, SIZES, SUMMARY, FREQUENCIES, AGAIN, main="main")
    )
    written = ordered[ROWS] | "Write" >> beam.Map(write_shard, plan, AsDict(ordered[SIZES]))
    summary = (ordered[SUMMARY], written) | "Summaries" >> beam.Flatten()
    return {SUMMARY: summary, FREQUENCIES: ordered[FREQUENCIES], AGAIN: ordered[AGAIN]}


def order_shard(
    shard: Shard, plan: QueriesPlan, exchange: Exchange, staged: Files, label_sizes: dict[int, int]
) -> Iterator[Any]:
    """Order the rows of a shard, with the labels of its pairs: their places, size, label counts, and summaries.

    Rows are not written again: what is sent on is each one's place among those that were gathered, and its labels where
    these are others now.
    """
    plan.meter.start(ORDER)
    table = shard.gather(plan, [name for name in plan.row_schema.names if name not in _UNORDERED])
    table = table.append_column(_POSITION, pa.array(np.arange(table.num_rows)))
    ordered = rows.order(table)
    rows_in, others = ordered.rows.num_rows + ordered.merged + ordered.rejected.num_rows, 0
    table, rejects = ordered.rows, duplicates(ordered, plan.sources)
    if plan.pairs:
        pairs = gather(read_places(shard.pairs), PAIRS)
        table, unknown = rows.add_pairs(table, pairs["key"].combine_chunks(), pairs["label_id"].to_numpy())
        lost_pairs = points.reject_rows(
            pairs.filter(pa.array(unknown)),
            plan.sources,
            Reason.UNKNOWN_QUERY,
            "the query {key} is not among the points",
        )
        yield TaggedOutput(SUMMARY, reported(f"pairs/{plan.source}", lost_pairs, staged))
        table, lost = points.without_labels(table, plan.sources)
        if plan.shared:
            others = len(lost)
        else:
            rejects += lost
    counters = Counter(rows_in=rows_in - others, rows_merged=ordered.merged)
    counters.update(_count(table))
    yield TaggedOutput(SUMMARY, reported(plan.source, rejects, staged, counters={plan.name: counters}))
    yield TaggedOutput(SIZES, (shard.number, table.num_rows))
    counts = count_labels(parquet.list_column(table, "label_ids").values, first_ids(label_sizes))
    for place in exchange.send(counts):
        yield TaggedOutput(FREQUENCIES, place)
    for place in exchange.send(route_keys(one_batch(table), plan.older)):
        yield TaggedOutput(AGAIN, place)
    changed = [name for name in rows.LISTS if name in table.column_names and (ordered.merged or plan.pairs)]
    placed = exchange.send([(shard.number, one_batch(table.select([_POSITION, *changed])))])
    for _, packet in plan.meter.count_bytes(ORDER, placed):
        yield TaggedOutput(ROWS, (shard, packet))
    plan.meter.count(ORDER, rows_in)


def write_shard(element: tuple[Shard, Packet], plan: QueriesPlan, sizes: dict[int, int]) -> Summary:
    """Write the file of (shard, places of its rows in order); `sizes` (rows of each shard) tell its first id."""
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
    """Return the manifest's counters of ordered rows, but for those of their texts."""
    counts = Counter(
        rows_out=table.num_rows,
        truncated=int(np.count_nonzero(table["truncated"].to_numpy())),
        labels=len(parquet.list_column(table, "label_ids").values),
        labels_merged=int(table["merged"].to_numpy().sum()),
    )
    if "filter_label_ids" in table.column_names:
        counts["filter_pairs_applied"] = len(parquet.list_column(table, "filter_label_ids").values)
    return counts
