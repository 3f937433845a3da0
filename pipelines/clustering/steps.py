"""Steps of a worker, without Beam: count a shard's rows by part, deal them, cluster a part, write a shard."""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from pipelines.clustering.balanced import balanced_order, parts_of
from pipelines.clustering.plan import ROW, VECTOR, ClusterPlan, Settled
from pipelines.common.exchange import Exchange, Packet, gather, one_batch, receive, split_by
from pipelines.common.summary import Summary
from pipelines.common.vectors import rechunk, require_finite
from schemas.shard_files import parquet
from schemas.shard_files.parquet import matrix_column

PARTS, TABLE = "parts", "queries"  # names in a Summary
COUNT, DEAL, CLUSTER, WRITE = "count parts", "deal", "cluster", "write"  # steps
_ROWS = 1 << 13  # dealt at a time


def count_parts(shard: int, plan: ClusterPlan) -> Summary:
    """Count the rows of source shard `shard` by their part."""
    counts = np.zeros(plan.tree.parts, np.int64)
    plan.meter.start(COUNT)
    for _, part in _parted(plan, shard, [plan.inputs.source.id_column]):
        plan.meter.count(COUNT, len(part))
        counts += np.bincount(part, minlength=len(counts))
    return Summary(counters={PARTS: Counter({str(part): int(count) for part, count in enumerate(counts) if count})})


def deal_shard(shard: int, settled: Settled, exchange: Exchange) -> Iterator[tuple[int, Packet]]:
    """Send the rows of source shard `shard`, with their numbers and vectors: (part, packet)."""
    columns = [name for name in settled.schema.names if name != "query_id"] + ["query_id"]
    meter = settled.plan.meter
    meter.start(DEAL)
    for rows, part in _parted(settled.plan, shard, columns):
        yield from meter.count_bytes(DEAL, exchange.send(split_by(one_batch(rows.drop_columns(["query_id"])), part)))
        meter.count(DEAL, rows.num_rows)


def cluster_part(
    element: tuple[int, Iterable[Packet]], settled: Settled, exchange: Exchange
) -> Iterator[tuple[int, Packet]]:
    """Cluster the rows of (part, packets) and send them: (shard of the new table, packet), places in column `row`."""
    part, packets = element
    plan = settled.plan
    plan.meter.start(CLUSTER)
    rows = pa.Table.from_batches(receive(packets))
    # Whatever the order of arrival.
    rows = rows.take(pa.array(np.argsort(rows[ROW].to_numpy(), kind="stable"))).combine_chunks()
    order, _ = balanced_order(matrix_column(rows, VECTOR), plan.size, plan.smallest, plan.seed)
    rows = rows.drop_columns([ROW, VECTOR]).take(pa.array(order))
    shard, place = settled.layout.places(part)
    sent = exchange.send(split_by(one_batch(rows.append_column(ROW, pa.array(place))), shard))
    yield from plan.meter.count_bytes(CLUSTER, sent)
    plan.meter.count(CLUSTER, rows.num_rows)


def write_shard(element: tuple[int, Iterable[Packet]], settled: Settled) -> Summary:
    """Write (shard, packets) of the new table, its rows numbered on from those of the shards before."""
    shard, packets = element
    layout, schema, meter = settled.layout, settled.schema, settled.plan.meter
    meter.start(WRITE)
    placed = schema.remove(schema.get_field_index("query_id")).append(pa.field(ROW, pa.int64()))
    rows = gather(packets, placed)
    rows = rows.take(pa.array(np.argsort(rows[ROW].to_numpy(), kind="stable")))
    first = layout.first_row(shard)
    ids = pa.array(np.arange(first, first + layout.rows_of(shard)))
    rows = rows.append_column("query_id", ids).select(schema.names).cast(schema)
    entry = parquet.write_shard(settled.plan.inputs.out, shard, layout.shards, rows, layout.row_group_rows)
    meter.count(WRITE, rows.num_rows, entry.bytes)
    return Summary(shards={TABLE: (entry,)})


def _parted(plan: ClusterPlan, shard: int, columns: list[str]) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """Yield rows of source shard `shard`, some at a time, with their numbers and vectors, and the part of each."""
    first, source = plan.first_row(shard), plan.inputs.source
    for rows in rechunk(source.aligned(shard, columns), _ROWS):
        vectors = matrix_column(rows, VECTOR)
        require_finite(vectors, first, source.embeddings.url)
        numbers = pa.array(np.arange(first, first + rows.num_rows))
        yield rows.append_column(ROW, numbers), parts_of(plan.tree, vectors, first)
        first += rows.num_rows
