"""`extremis cluster`: queries in the order of balanced clusters of their embeddings (NGAME, section 3, algorithm 1).

    shards ─▶ count rows of each part of the tree's top            (more queries than fit into one worker only)
    shards ─▶ deal rows to parts ─▶ cluster each part ─▶ deal to shards of the new table ─▶ write ─▶ sum up ─▶ publish

The table is one of queries like any other: the stream reads it in turn, and its rows tell where clusters are.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from pipelines.clustering import steps
from pipelines.clustering.inputs import dumps_for_clusters, open_clustering
from pipelines.clustering.plan import ClusterPlan, Settled, make_layout, make_plan
from pipelines.common.dumps import watch_dumps
from pipelines.common.exchange import Exchange, choose_exchange
from pipelines.common.flow import Flow
from pipelines.common.progress import Progress, Watch, say_use, silent
from pipelines.common.summary import Summary, read_summary, write_sum
from pipelines.options import ClusterOptions
from pipelines.runners.runner import Runner, choose_runner, for_workers
from schemas.layout import CLUSTERS, staging
from schemas.manifest import Manifest, columns_of, manifest_url
from schemas.owners.build import Build, building, clean_up
from schemas.owners.place import require_place
from schemas.reuse import find_by_parents

__all__ = ["ClusterOptions", "cluster", "watch"]


def cluster(
    data: str,
    run: str,
    epoch: int | None = None,
    options: ClusterOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> Manifest:
    """Publish the queries of one dump (the newest by default) in cluster order: the manifest of the new table.

    A table that was already made of the same with the same options is returned as it is. `beam_options` go to Beam;
    `progress` gets a line a step. Raises InputError (no dump, wrong options, a table made with other options, one in
    use), TableError (a dump that is unfinished, damaged, or of other data), StorageError.
    """
    say, place = progress or silent, functools.partial(for_workers, beam_options)
    data, run, options = place(data), place(run), (options or ClusterOptions()).for_workers(place)
    inputs = open_clustering(data, run, epoch, options.queries, options.for_epoch, options.out)
    if options.out is not None:
        require_place(options.out, "clustered", [data, run])
    plan = make_plan(inputs, options)
    finished = plan.finished_table(options, run)
    if finished is not None:
        clean_up(inputs.out, "clustered")
        say(f"{inputs.name}: already clustered{say_use(inputs.use_from)}")
        return finished
    with choose_runner(beam_options) as runner, building(inputs.out, "clustered", say) as build:
        # The last owner may have made it.
        return plan.finished_table(options, run) or _make(plan, build, runner, say)


def watch(
    data: str,
    run: str,
    options: ClusterOptions | None = None,
    beam_options: Sequence[str] = (),
    poll_seconds: float | None = None,
    until: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> int:
    """Cluster every dump that asks for it and has no table, until the run is finished: as `pipelines.mine.watch`."""
    say, options = progress or silent, options or ClusterOptions()

    def make(epoch: int) -> bool:
        inputs = open_clustering(data, run, epoch, None, None, None)
        if find_by_parents(inputs.out, "queries", inputs.parents):
            return False
        cluster(data, run, epoch, options, beam_options, say)
        return True

    return watch_dumps(run, lambda: dumps_for_clusters(run), make, say, poll_seconds, until)


def _make(plan: ClusterPlan, build: Build, runner: Runner, say: Progress) -> Manifest:
    name = plan.inputs.name
    watch = Watch(staging(build.url), say)
    plan = replace(plan, inputs=replace(plan.inputs, out=build.url), meter=watch.meter)
    runner.check([manifest_url(plan.inputs.source.queries.url)], build.url, say)
    counts, queries = _count(plan, runner, watch), plan.queries
    shard_rows = max(1, queries.rows // len(queries.shards))
    layout = make_layout(counts, plan.size, queries.manifest.row_group_rows or 1, shard_rows, plan.seed)
    settled = Settled(plan, layout, queries.schema)
    parts = f" in {plan.tree.parts} parts" if plan.tree.parts > 1 else ""
    say(f"{name}: {queries.rows:,} queries{parts}, {layout.clusters:,} clusters of {layout.rows}")
    watch.expect(dict.fromkeys((steps.DEAL, steps.CLUSTER, steps.WRITE), queries.rows))
    runner.run(_flow(settled, choose_exchange(runner.shuffles, staging(build.url))), watch)
    manifest = build.publish(_describe(settled, read_summary(plan.summary)))
    watch.summarize()
    say(f"{name}: clustered{say_use(plan.inputs.use_from)}")
    return manifest


def _count(plan: ClusterPlan, runner: Runner, watch: Watch) -> list[int]:
    """Return the rows of each part: counted where there are several."""
    if plan.tree.parts == 1:
        return [plan.queries.rows]
    flow = Flow()
    shards = flow.create("Shards", range(len(plan.queries.shards)))
    write_sum(shards.map("Count parts", steps.count_parts, plan), plan.summary)
    watch.expect({steps.COUNT: plan.queries.rows})
    runner.run(flow, watch)
    summary = read_summary(plan.summary)
    return [summary.count(steps.PARTS, str(part)) for part in range(plan.tree.parts)]


def _flow(settled: Settled, exchange: Exchange) -> Flow:
    flow = Flow()
    shards = flow.create("Shards", range(len(settled.plan.queries.shards)))
    dealt = shards.flat_map("Deal rows", steps.deal_shard, settled, exchange).group("By part")
    clustered = dealt.flat_map("Cluster", steps.cluster_part, settled, exchange).group("By shard")
    write_sum(clustered.map("Write shards", steps.write_shard, settled), settled.plan.summary)
    return flow


def _describe(settled: Settled, summary: Summary) -> Manifest:
    plan, layout = settled.plan, settled.layout
    parameters = plan.parameters()
    parameters[CLUSTERS] |= {"rows": layout.rows, "count": layout.clusters}
    rows = plan.queries.rows
    return Manifest(
        kind="queries",
        columns=columns_of(settled.schema),
        shards=summary.shards_of(steps.TABLE),
        rows=rows,
        row_group_rows=layout.row_group_rows,
        id_range=(0, rows),
        parents=plan.inputs.parents,
        parameters=parameters,
        counters={"rows": rows, "clusters": layout.clusters, "short_clusters": sum(layout.short)},
    )
