"""Labels: parsed blocks to ordered shards, whose ranks are the ids; joined with training counts and written."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.pvalue import PCollection, TaggedOutput

from pipelines.common import assign
from pipelines.common.exchange import Exchange, Files, Packet, gather, one_batch, receive
from pipelines.common.summary import SUMMARY, Block, Summary
from pipelines.formats.base import LABELS
from pipelines.formats.rejects import Reason, Reject
from pipelines.sharding import rows
from pipelines.sharding.plan import LabelsPlan
from pipelines.sharding.steps import (
    ROWS,
    SIZES,
    encode,
    every_shard,
    first_ids,
    keep,
    open_tokens,
    reopen,
    reported,
    send_to_shards,
)
from schemas.shard_files import parquet, shards

KEYS = "keys"
ENCODE, ORDER, WRITE = "tokenize labels", "order labels", "write labels"  # steps


class OrderedLabels(NamedTuple):
    """Labels by shard: rows and keys (shard, packet), sizes (shard, number of labels), in the order of their ids.

    Of a version, shards of labels before have the first numbers, and those of new labels follow. `keys` go by the hash
    of the key, and have ids where labels have one already.
    """

    rows: PCollection
    keys: PCollection
    sizes: PCollection
    summary: PCollection


@beam.ptransform_fn
def order_labels(
    pipeline: Any, plan: LabelsPlan, blocks: list[Block], exchange: Exchange, staged: Files, rejects: Files
) -> OrderedLabels:
    """Order labels by their ids: by (hash, key), or by row in a form without keys. Rows go to `staged`."""
    encoded = pipeline | "Blocks" >> beam.Create(blocks) | "Encode" >> beam.ParDo(EncodeLabels(plan, exchange))
    ordered = (
        {"rows": encoded, "every": pipeline | "Shards" >> every_shard(plan.shards)}
        | "By shard" >> beam.CoGroupByKey()
        | "Order"
        >> beam.FlatMap(order_shard, plan, exchange, staged, rejects).with_outputs(
            ROWS, KEYS, SIZES, SUMMARY, main="main"
        )
    )
    return OrderedLabels(ordered[ROWS], ordered[KEYS], ordered[SIZES], ordered[SUMMARY])


@beam.ptransform_fn
def keep_labels(ordered: OrderedLabels, staged: Files) -> PCollection:
    """Keep rows and sizes of ordered labels for the next pipeline; yields Summary."""
    sizes = ordered.sizes | "Sizes" >> beam.MapTuple(lambda shard, rows: Summary(label_sizes={shard: rows}))
    return (ordered.summary, sizes, ordered.rows | "Rows" >> keep(LABELS, staged)) | "Summaries" >> beam.Flatten()


@beam.ptransform_fn
def write_labels(counts: PCollection, plan: LabelsPlan, ordered: Summary) -> PCollection:
    """Write labels, whose rows `ordered` tells, joined with training counts (shard, packet); yields Summary."""
    rows = counts.pipeline | "Labels in order" >> reopen(ordered.kept.get(LABELS, {}))
    joined = {"rows": rows, "counts": counts} | "Join counts" >> beam.CoGroupByKey()
    return joined | "Write" >> beam.Map(write_shard, plan, ordered.label_sizes)


class EncodeLabels(beam.DoFn):
    """Encoder of blocks: Block to (shard, packet)."""

    def __init__(self, plan: LabelsPlan, exchange: Exchange) -> None:
        self._plan, self._exchange = plan, exchange

    def setup(self) -> None:
        self._tokens = open_tokens(self._plan)

    def process(self, element: Block) -> Iterator[tuple[int, Packet]]:
        plan = self._plan
        plan.meter.start(ENCODE)
        batch = encode(element.read(), plan, self._tokens).select(plan.row_schema.names)
        if plan.keyed:
            sent = send_to_shards(self._exchange, batch, plan.shards)
        else:
            shard = batch["row"].to_numpy() // plan.shard_rows
            sent = self._exchange.send(assign.split_by(batch, shard))
        yield from plan.meter.count_bytes(ENCODE, sent)
        plan.meter.count(ENCODE, batch.num_rows)


def order_shard(
    element: tuple[int, dict[str, Any]], plan: LabelsPlan, exchange: Exchange, staged: Files, rejected: Files
) -> Iterator[Any]:
    """Order the labels of (shard, parts): its rows, its keys, its size, and a summary."""
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
    counters["truncated"] = int(np.count_nonzero(table["truncated"].to_numpy()))
    yield TaggedOutput(SUMMARY, reported(LABELS, rejects, rejected, counters={plan.name: counters}))
    yield TaggedOutput(SIZES, (shard, table.num_rows))
    for tag, columns, channel in ((ROWS, table, staged), (KEYS, table.select(["key"]), exchange)):
        for place in plan.meter.count_bytes(ORDER, channel.send([(shard, one_batch(columns))])):
            yield TaggedOutput(tag, place)
    plan.meter.count(ORDER, counters["rows_in"])


def write_shard(element: tuple[int, dict[str, Any]], plan: LabelsPlan, sizes: dict[int, int]) -> Summary:
    """Write the file of (shard, parts): ordered labels, and their counts in any order."""
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
    """Return the rejects among ordered rows: those whose key is that of another row with another content."""
    rejects = []
    for row, kept in zip(ordered.rejected.to_pylist(), ordered.kept.to_pylist(), strict=True):
        place = f"{sources[kept['part']]}, line {kept['row'] + 1}"
        detail = f"the key {ascii(row['key'])[:80]} is that of {place}, with another content"
        rejects.append(Reject(sources[row["part"]], row["row"] + 1, Reason.DUPLICATE_KEY, detail))
    return rejects


def count_labels(label_ids: np.ndarray, first: np.ndarray) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Count `label_ids` [V]: (shard, columns `label_id` and `count`); shard s has [first[s], first[s + 1]).

    first: int64 [shards + 1]. So no worker ever holds counts of all labels.
    """
    ids, counts = np.unique(label_ids, return_counts=True)
    batch = pa.record_batch({"label_id": pa.array(ids, pa.int64()), "count": pa.array(counts, pa.int64())})
    return assign.split_by(batch, np.searchsorted(first, ids, side="right") - 1)


def sum_counts(parts: Iterable[pa.RecordBatch], first: int, labels: int) -> np.ndarray:
    """Sum the training points of the labels [first, first + labels): int64 [labels]."""
    total = np.zeros(labels, np.int64)
    for part in parts:
        np.add.at(total, part["label_id"].to_numpy() - first, part["count"].to_numpy())
    return total


def count_tokens(table: pa.Table) -> Counter[str]:
    """Count tokens and features of finished rows, and rows without either."""
    counts: Counter[str] = Counter()
    empty = np.ones(table.num_rows, bool)
    for name, counted in (("input_ids", "tokens"), ("feature_ids", "features")):
        if name in table.column_names:
            lengths = parquet.list_column(table, name).counts
            counts[counted] = int(lengths.sum())
            empty &= lengths == 0
    counts["empty_texts"] = int(empty.sum())
    return counts
