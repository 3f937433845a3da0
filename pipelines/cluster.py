"""`extremis cluster`: sort queries by clusters of their embeddings (NGAME, section 3, algorithm 1).

    shards ─▶ count rows of each part of the tree's top            (only if one worker cannot hold all queries)
    shards ─▶ deal rows to parts ─▶ cluster each part ─▶ deal to shards of the new table ─▶ write ─▶ sum up ─▶ publish

The result is an ordinary table of queries. The trainer reads the table sequentially; the row counts of the row groups
show where each cluster starts.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from pipelines.clustering.balanced import assign_parts, balanced_order
from pipelines.clustering.inputs import dumps_for_clusters, open_clustering
from pipelines.clustering.plan import ROW, VECTOR, ClusterPlan, LayoutPlan, make_layout, make_plan
from pipelines.common.dumps import watch_dumps
from pipelines.common.progress import Progress, say_use, silent
from pipelines.common.vectors import require_finite
from pipelines.flow import Collection, FileExchange, Flow, Packet, gather, receive, split_by, to_record_batch
from pipelines.job import Job, Summary, describe, make_table
from pipelines.options import ClusterOptions
from pipelines.runners.local import for_workers
from schemas.layout import CLUSTERS, MANIFEST
from schemas.manifest import Manifest
from schemas.owners.outputs import require_output_folder
from schemas.reuse import Request, find_by_parents
from schemas.shard_files import parquet
from schemas.shard_files.parquet import matrix_column
from schemas.storage import join
from schemas.table import rechunk

__all__ = ["ClusterOptions", "cluster", "watch"]

PARTS, TABLE = "parts", "queries"  # names in a Summary
COUNT, DEAL, CLUSTER, WRITE = "count parts", "deal", "cluster", "write"  # steps
_ROWS = 1 << 13  # rows that are dealt at a time


def cluster(
    data: str,
    run: str,
    epoch: int | None = None,
    options: ClusterOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> Manifest:
    """Publish the queries of one dump (the newest by default) in cluster order. Returns the manifest of the new table.

    If a table was already built from the same input with the same options, it is returned. `beam_options` are passed to
    Beam; `progress` receives one line per step. Raises InputError (no dump, invalid options, a table built with other
    options, a table in use), TableError (a dump that is unfinished, damaged, or from other data), StorageError.
    """
    say, place = progress or silent, functools.partial(for_workers, beam_options)
    data, run, options = place(data), place(run), (options or ClusterOptions()).for_workers(place)
    inputs = open_clustering(data, run, epoch, options)
    if options.out is not None:
        require_output_folder(options.out, "clustered", [data, run])
    plan = make_plan(inputs, options)

    def make(job: Job) -> Manifest:
        own = replace(plan, inputs=replace(inputs, out=job.build.url), meter=job.watch.meter)
        manifest = job.build.publish(_make(own, job, say))
        say(f"{inputs.name}: clustered{say_use(inputs.use_from)}")
        return manifest

    def find() -> Manifest | None:
        finished = plan.finished_table(options, run)
        if finished is not None:
            say(f"{inputs.name}: already clustered{say_use(inputs.use_from)}")
        return finished

    reads = [join(inputs.source.queries.url, MANIFEST)]
    return make_table(inputs.out, "clustered", find, make, beam_options, say, needs={}, reads=reads)


def watch(
    data: str,
    run: str,
    options: ClusterOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> int:
    """Cluster every dump that requests clusters and has no table, until the run is finished, like `mine.watch`."""
    say, options = progress or silent, options or ClusterOptions()

    def make(epoch: int) -> bool:
        inputs = open_clustering(data, run, epoch, options)
        if find_by_parents(inputs.out, "queries", inputs.parents):
            return False
        cluster(data, run, epoch, options, beam_options, say)
        return True

    return watch_dumps(run, lambda: dumps_for_clusters(run), make, say)


def _make(plan: ClusterPlan, job: Job, say: Progress) -> Manifest:
    counts, queries = _count(plan, job), plan.queries
    shard_rows = max(1, queries.rows // len(queries.shards))
    layout = make_layout(counts, plan.size, queries.manifest.row_group_rows or 1, shard_rows, plan.seed)
    layout_plan = LayoutPlan(plan, layout, queries.schema)
    parts = f" in {plan.tree.parts} parts" if plan.tree.parts > 1 else ""
    say(
        f"{plan.inputs.name}: {queries.rows:,} queries{parts}, to be grouped into {layout.clusters:,} clusters of "
        f"{layout.rows}"
    )
    exchange = FileExchange(job.watch.staging)

    def wire(flow: Flow) -> Collection:
        shards = flow.create("Shards", range(len(queries.shards)))
        dealt = shards.flat_map("Deal rows", deal_shard, layout_plan, exchange).group("By part")
        clustered = dealt.flat_map("Cluster", cluster_part, layout_plan, exchange).group("By shard")
        return clustered.map("Write shards", write_shard, layout_plan)

    names = dict.fromkeys((DEAL, CLUSTER, WRITE), queries.rows)
    return _describe(layout_plan, job.run("cluster", names, wire))


def _count(plan: ClusterPlan, job: Job) -> list[int]:
    """Return the number of rows in each part. Rows are counted only if there are several parts."""
    if plan.tree.parts == 1:
        return [plan.queries.rows]
    summary = job.run_step(COUNT, plan.queries.rows, range(len(plan.queries.shards)), count_parts, plan)
    return [summary.count(PARTS, str(part)) for part in range(plan.tree.parts)]


def _describe(layout_plan: LayoutPlan, summary: Summary) -> Manifest:
    plan, layout, rows = layout_plan.plan, layout_plan.layout, layout_plan.plan.queries.rows
    parameters = plan.parameters()
    parameters[CLUSTERS] |= {"rows": layout.rows, "count": layout.clusters}
    request = Request(TABLE, plan.inputs.parents, parameters)
    counters = {"rows": rows, "clusters": layout.clusters, "short_clusters": sum(layout.short)}
    return describe(request, summary, layout_plan.schema, layout.row_group_rows, (0, rows), counters=counters)


def count_parts(shard: int, plan: ClusterPlan) -> Summary:
    """Count the rows of source shard `shard` per part."""
    counts = np.zeros(plan.tree.parts, np.int64)
    plan.meter.start(COUNT)
    for _, part in _read_parts(plan, shard, [plan.queries.id_column]):
        plan.meter.count(COUNT, len(part))
        counts += np.bincount(part, minlength=len(counts))
    return Summary(counters={PARTS: Counter({str(part): int(count) for part, count in enumerate(counts) if count})})


def deal_shard(shard: int, layout_plan: LayoutPlan, exchange: FileExchange) -> Iterator[tuple[int, Packet]]:
    """Send the rows of source shard `shard`, with row numbers and vectors, as (part, packet)."""
    columns = [name for name in layout_plan.schema.names if name != "query_id"] + ["query_id"]
    meter = layout_plan.plan.meter
    meter.start(DEAL)
    for rows, part in _read_parts(layout_plan.plan, shard, columns):
        yield from meter.count_bytes(
            DEAL, exchange.send(split_by(to_record_batch(rows.drop_columns(["query_id"])), part))
        )
        meter.count(DEAL, rows.num_rows)


def cluster_part(
    element: tuple[int, Iterable[Packet]], layout_plan: LayoutPlan, exchange: FileExchange
) -> Iterator[tuple[int, Packet]]:
    """Cluster the rows of (part, packets); send (shard of the new table, packet with the positions in `row`)."""
    part, packets = element
    plan = layout_plan.plan
    plan.meter.start(CLUSTER)
    rows = pa.Table.from_batches(receive(packets)).sort_by(ROW).combine_chunks()  # independent of the order of arrival
    order, _ = balanced_order(matrix_column(rows, VECTOR), plan.size, plan.smallest, plan.seed)
    rows = rows.drop_columns([ROW, VECTOR]).take(pa.array(order))
    shard, place = layout_plan.layout.positions(part)
    sent = exchange.send(split_by(to_record_batch(rows.append_column(ROW, pa.array(place))), shard))
    yield from plan.meter.count_bytes(CLUSTER, sent)
    plan.meter.count(CLUSTER, rows.num_rows)


def write_shard(element: tuple[int, Iterable[Packet]], layout_plan: LayoutPlan) -> Summary:
    """Write (shard, packets) as a shard of the new table; row numbers continue from the earlier shards."""
    shard, packets = element
    layout, schema, meter = layout_plan.layout, layout_plan.schema, layout_plan.plan.meter
    meter.start(WRITE)
    placed = schema.remove(schema.get_field_index("query_id")).append(pa.field(ROW, pa.int64()))
    rows = gather(packets, placed).sort_by(ROW)
    ids = pa.array(np.arange(*layout.first[shard : shard + 2]))
    rows = rows.append_column("query_id", ids).select(schema.names).cast(schema)
    shards = len(layout.first) - 1
    entry = parquet.write_shard(layout_plan.plan.inputs.out, shard, shards, rows, layout.row_group_rows)
    meter.count(WRITE, rows.num_rows, entry.bytes)
    return Summary(shards={TABLE: (entry,)})


def _read_parts(plan: ClusterPlan, shard: int, columns: list[str]) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """Yield batches of rows of source shard `shard`, with their numbers and vectors, and the part of each row."""
    first, source = plan.first_row(shard), plan.inputs.source
    for rows in rechunk(source.aligned(shard, columns), _ROWS):
        vectors = matrix_column(rows, VECTOR)
        require_finite(vectors, first, source.embeddings.url)
        numbers = pa.array(np.arange(first, first + rows.num_rows))
        yield rows.append_column(ROW, numbers), assign_parts(plan.tree, vectors, first)
        first += rows.num_rows
