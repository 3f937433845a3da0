"""What workers do, without Beam: count a shard's rows by part, deal them, cluster a part, write a shard."""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from pipelines.clustering.balanced import balanced_order
from pipelines.clustering.plan import ROW, VECTOR, Laid, Plan
from pipelines.clustering.top import parts_of
from pipelines.common.aligned import rechunk
from pipelines.common.assign import split_by
from pipelines.common.exchange import Exchange, Packet, receive
from pipelines.common.vector_blocks import require_finite
from pipelines.sharding.steps import gather, one_batch
from schemas.manifest import Shard
from schemas.shard_files.parquet import matrix_column, write_shard

_ROWS = 1 << 13  # dealt at a time


def count_parts(plan: Plan, shard: int) -> Counter[str]:
    """Rows of source shard `shard` by the part that they fall into."""
    counts = np.zeros(plan.tree.parts, np.int64)
    for _, part in _parted(plan, shard, [plan.inputs.source.id_column]):
        counts += np.bincount(part, minlength=len(counts))
    return Counter({str(part): int(count) for part, count in enumerate(counts) if count})


def deal_shard(laid: Laid, shard: int, exchange: Exchange) -> Iterator[tuple[int, Packet]]:
    """(part, packet) of the rows of source shard `shard`, with their numbers and vectors."""
    wanted = [name for name in laid.schema.names if name != "query_id"] + ["query_id"]
    for rows, part in _parted(laid.plan, shard, wanted):
        yield from exchange.send(split_by(one_batch(rows.drop_columns(["query_id"])), part))


def lay_part(laid: Laid, part: int, packets: Iterable[Packet], exchange: Exchange) -> Iterator[tuple[int, Packet]]:
    """(shard of the new table, packet) of the rows of part `part`, each with its place there in column `row`."""
    plan = laid.plan
    rows = pa.Table.from_batches(receive(packets))
    # Whatever the order of arrival.
    rows = rows.take(pa.array(np.argsort(rows[ROW].to_numpy(), kind="stable"))).combine_chunks()
    order, _ = balanced_order(matrix_column(rows, VECTOR), plan.size, plan.smallest, plan.seed)
    rows = rows.drop_columns([ROW, VECTOR]).take(pa.array(order))
    shard, place = laid.layout.places(part)
    yield from exchange.send(split_by(one_batch(rows.append_column(ROW, pa.array(place))), shard))


def write_laid(laid: Laid, shard: int, packets: Iterable[Packet]) -> Shard:
    """Write shard `shard` of the new table, its rows numbered on from those of the shards before."""
    layout = laid.layout
    placed = laid.schema.remove(laid.schema.get_field_index("query_id")).append(pa.field(ROW, pa.int64()))
    rows = gather(packets, placed)
    rows = rows.take(pa.array(np.argsort(rows[ROW].to_numpy(), kind="stable")))
    first = layout.first_row(shard)
    ids = pa.array(np.arange(first, first + layout.rows_of(shard)))
    rows = rows.append_column("query_id", ids).select(laid.schema.names).cast(laid.schema)
    return write_shard(laid.plan.inputs.out, shard, layout.shards, rows, layout.row_group_rows)


def _parted(plan: Plan, shard: int, columns: list[str]) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """Rows of source shard `shard`, some at a time, with their numbers and vectors, and the part of each."""
    first, source = plan.first_row(shard), plan.inputs.source
    for rows in rechunk(source.aligned(shard, columns), _ROWS):
        vectors = matrix_column(rows, VECTOR)
        require_finite(vectors, first, source.embeddings_url)
        numbers = pa.array(np.arange(first, first + rows.num_rows))
        yield rows.append_column(ROW, numbers), parts_of(plan.tree, vectors, first)
        first += rows.num_rows
