"""Queries of one split: attach label ids, tokenize, spread over the shards, order, number, write."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.pvalue import AsDict, PCollection, TaggedOutput

from pipelines.common import assign
from pipelines.common.exchange import Exchange, Files, Packet, gather, one_batch, receive
from pipelines.common.summary import SUMMARY, Block, Summary
from pipelines.formats.rejects import Reason, Reject
from pipelines.sharding import points, rows
from pipelines.sharding.labels import count_labels, count_tokens, duplicates
from pipelines.sharding.older import route_keys
from pipelines.sharding.plan import QueriesPlan
from pipelines.sharding.resolve import known_ids
from pipelines.sharding.steps import ROWS, SIZES, encode, every_shard, first_ids, open_tokens, reported, send_to_shards
from schemas import storage
from schemas.shard_files import parquet, shards

FREQUENCIES, AGAIN = "frequencies", "again"
ENCODE, ORDER, WRITE = "tokenize", "order", "write"  # steps
PAIRS = pa.schema(
    [("hash", pa.uint64()), ("part", pa.int32()), ("row", pa.int64()), ("key", pa.string()), ("label_id", pa.int64())]
)


@beam.ptransform_fn
def shard_queries(
    pipeline: Any,
    plan: QueriesPlan,
    named: dict[str, PCollection],
    pairs: dict[str, PCollection] | None,
    label_sizes: PCollection,
    exchange: Exchange,
    staged: Files,
) -> dict[str, PCollection]:
    """Shard one split; yields the collections `summary` (Summary) and `frequencies` (label shard, packet).

    Besides `again` (older shard, packet): keys that older points may have, where the plan names any.

    named: the split's `blocks` (number, Block), and `ids` (number, packet) of the labels that they name. pairs: those
    of its pairs, or None. label_sizes: (label shard, number of labels).
    """
    assembled = (
        named
        | "Join ids" >> beam.CoGroupByKey()
        | "Assemble" >> beam.ParDo(AssemblePoints(plan, exchange, staged)).with_outputs(SUMMARY, main=ROWS)
    )
    summaries = [assembled[SUMMARY]]
    parts = {"rows": assembled[ROWS], "every": pipeline | "Shards" >> every_shard(plan.shards)}
    if pairs is not None:
        joined = (
            pairs
            | "Join ids of pairs" >> beam.CoGroupByKey()
            | "Pairs" >> beam.FlatMap(assemble_pairs, plan, exchange, staged).with_outputs(SUMMARY, main=ROWS)
        )
        summaries.append(joined[SUMMARY])
        parts["pairs"] = joined[ROWS]
    order = beam.FlatMap(order_shard, plan, exchange, staged, AsDict(label_sizes))
    ordered = (
        parts
        | "By shard" >> beam.CoGroupByKey()
        | "Order" >> order.with_outputs(ROWS, SIZES, SUMMARY, FREQUENCIES, AGAIN, main="main")
    )
    written = ordered[ROWS] | "Write" >> beam.Map(write_shard, plan, AsDict(ordered[SIZES]))
    summary = (*summaries, ordered[SUMMARY], written) | "Summaries" >> beam.Flatten()
    return {SUMMARY: summary, FREQUENCIES: ordered[FREQUENCIES], AGAIN: ordered[AGAIN]}


class AssemblePoints(beam.DoFn):
    """Assembler of points: (block number, block and ids) to (shard, packet) of tokenized rows."""

    def __init__(self, plan: QueriesPlan, exchange: Exchange, staged: Files) -> None:
        self._plan, self._exchange, self._staged = plan, exchange, staged

    def setup(self) -> None:
        plan = self._plan
        self._tokens = open_tokens(plan)
        self._filters = (
            np.frombuffer(storage.read_sealed(plan.filters), np.int64).reshape(-1, 2) if plan.filters else None
        )

    def process(self, element: tuple[int, dict[str, Any]]) -> Iterator[Any]:
        plan = self._plan
        plan.meter.start(ENCODE)
        for _, batch, rejects in _with_labels(element[1], plan):
            batch = points.attach_filters(encode(batch, plan, self._tokens), self._filters, plan)
            yield TaggedOutput(SUMMARY, reported(plan.source, rejects, self._staged))
            rows_sent = send_to_shards(self._exchange, batch.select(plan.row_schema.names), plan.shards)
            yield from plan.meter.weigh(ENCODE, rows_sent)
            plan.meter.count(ENCODE, batch.num_rows)


def assemble_pairs(
    element: tuple[int, dict[str, Any]], plan: QueriesPlan, exchange: Exchange, staged: Files
) -> Iterator[Any]:
    """Send the pairs of a block with their labels' ids: (shard, packet) of columns PAIRS."""
    for block, batch, rejects in _with_labels(element[1], plan):
        yield TaggedOutput(SUMMARY, reported(block.table, rejects, staged))
        batch = batch.filter(pc.equal(pc.list_value_length(batch["label_ids"]), 1))
        labels = batch["label_ids"].flatten().cast(pa.int64())
        yield from send_to_shards(exchange, batch.append_column("label_id", labels).select(PAIRS.names), plan.shards)


def order_shard(
    element: tuple[int, dict[str, Any]],
    plan: QueriesPlan,
    exchange: Exchange,
    staged: Files,
    label_sizes: dict[int, int],
) -> Iterator[Any]:
    """Order the rows of (shard, parts), with the labels of its pairs: its rows, size, label counts, and summaries."""
    shard, parts = element
    plan.meter.start(ORDER)
    # Ordering copies: the gathered rows are handed over, so that they can go as soon as they have been copied.
    ordered = rows.order(gather(parts["rows"], plan.row_schema))
    rows_in, others = ordered.rows.num_rows + ordered.merged + ordered.rejected.num_rows, 0
    table, rejects = ordered.rows, duplicates(ordered, plan.sources)
    if plan.pairs:
        pairs = gather(parts["pairs"], PAIRS)
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
    yield TaggedOutput(SIZES, (shard, table.num_rows))
    counts = count_labels(parquet.list_column(table, "label_ids").values, first_ids(label_sizes))
    for place in exchange.send(counts):
        yield TaggedOutput(FREQUENCIES, place)
    for place in exchange.send(route_keys(one_batch(table), plan.older)):
        yield TaggedOutput(AGAIN, place)
    for place in plan.meter.weigh(ORDER, exchange.send([(shard, one_batch(table))])):
        yield TaggedOutput(ROWS, place)
    plan.meter.count(ORDER, rows_in)


def write_shard(element: tuple[int, Packet], plan: QueriesPlan, sizes: dict[int, int]) -> Summary:
    """Write the file of (shard, its rows in order); `sizes` (rows of each shard) tell its first id."""
    shard, packet = element
    plan.meter.start(WRITE)
    table = gather([packet], plan.row_schema)
    first = int(first_ids(sizes)[shard])
    ids = pa.array(np.arange(first, first + table.num_rows, dtype=np.int64))
    table = table.append_column("query_id", ids).select(plan.schema.names).cast(plan.schema)
    entry = shards.write_shard(plan.table, shard, plan.shards, table, plan.row_group_rows, plan.sink)
    plan.meter.count(WRITE, table.num_rows, entry.bytes)
    return Summary(shards={plan.name: (entry,)})


def _with_labels(parts: dict[str, Any], plan: QueriesPlan) -> Iterator[tuple[Block, pa.RecordBatch, list[Reject]]]:
    """Yield each block, its rows of the plan's share with their labels' ids, and its rejects."""
    for block in parts["blocks"]:
        ids, keys = _mentioned(block, parts["ids"])
        batch = block.read()
        if plan.share != (0.0, 1.0):
            batch = batch.filter(pa.array(assign.in_share(batch["hash"].to_numpy(), plan.share)))
        yield block, *points.attach_labels(batch, plan, ids, keys)


def _mentioned(block: Block, ids: Iterable[Packet]) -> tuple[np.ndarray, pa.Array | None]:
    """Return (id of each label key that the block names, the keys)."""
    if block.mentions is None:
        return np.zeros(0, np.int64), None
    (named,) = receive([block.mentions])
    return known_ids(named.num_rows, receive(ids)), named["key"]


def _count(table: pa.Table) -> Counter[str]:
    """Return the manifest's counters of finished rows."""
    counts = count_tokens(table)
    counts.update(
        rows_out=table.num_rows,
        truncated=int(np.count_nonzero(table["truncated"].to_numpy())),
        labels=len(parquet.list_column(table, "label_ids").values),
        labels_merged=int(table["merged"].to_numpy().sum()),
    )
    if "filter_label_ids" in table.column_names:
        counts["filter_pairs_applied"] = len(parquet.list_column(table, "filter_label_ids").values)
    return counts
