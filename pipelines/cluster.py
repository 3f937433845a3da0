"""`extremis cluster`: queries in the order of balanced clusters of their embeddings (NGAME, section 3, algorithm 1).

    shards ─▶ count rows of each part of the tree's top            (more queries than fit into one worker only)
    shards ─▶ deal rows to parts ─▶ cluster each part ─▶ deal to shards of the new table ─▶ write ─▶ sum up ─▶ publish

The table is one of queries like any other: the stream reads it in turn, and its rows tell where clusters are.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import apache_beam as beam

from pipelines.clustering import steps
from pipelines.clustering.inputs import dumps_for_clusters, open_clustering
from pipelines.clustering.layout import make_layout
from pipelines.clustering.options import ClusterOptions
from pipelines.clustering.plan import Laid, Plan, make_plan
from pipelines.common.claim import claimed
from pipelines.common.exchange import Exchange, Packet, choose
from pipelines.common.progress import Progress, say_use, silent
from pipelines.common.watch import watch_dumps
from pipelines.mining.reuse import require_unused
from pipelines.runners.runner import make_pipeline
from pipelines.runners.runner import run as run_pipeline
from pipelines.sharding.summary import MergeSummaries, Summary, WriteSummary
from schemas import storage
from schemas.errors import InputError
from schemas.layout import CLUSTERS, staging
from schemas.manifest import Manifest, columns_of, is_published, open_manifest, publish, unpublish
from schemas.shard_files.shards import open_shard

__all__ = ["ClusterOptions", "cluster", "watch"]

_PARTS, _TABLE = "parts", "queries"  # of a Summary


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
    say, options = progress or silent, options or ClusterOptions()
    inputs = open_clustering(data, run, epoch, options.queries, options.for_epoch, options.out)
    plan = make_plan(inputs, options)
    made = _finished(plan, options, run)
    if made is not None:
        say(f"{inputs.name}: already clustered{say_use(inputs.use_from)}")
        return made
    with claimed(inputs.out):
        made = _finished(plan, options, run)  # whoever held the claim before may have made it
        return made or _make(plan, beam_options, say)


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
        if is_published(inputs.out) and open_manifest(inputs.out, "queries").parents == inputs.parents:
            return False
        cluster(data, run, epoch, options, beam_options, say)
        return True

    return watch_dumps(run, lambda: dumps_for_clusters(run), make, say, poll_seconds, until)


class CountParts(beam.DoFn):
    """Source shard -> Summary: how many of its rows fall into each part."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def process(self, shard: int) -> Iterator[Summary]:
        yield Summary(counters={_PARTS: steps.count_parts(self._plan, shard)})


class DealRows(beam.DoFn):
    """Source shard -> (part, packet of rows)."""

    def __init__(self, laid: Laid, exchange: Exchange) -> None:
        self._laid, self._exchange = laid, exchange

    def process(self, shard: int) -> Iterator[tuple[int, Packet]]:
        yield from steps.deal_shard(self._laid, shard, self._exchange)


class LayClusters(beam.DoFn):
    """(part, its rows) -> (shard of the new table, packet of rows with their places)."""

    def __init__(self, laid: Laid, exchange: Exchange) -> None:
        self._laid, self._exchange = laid, exchange

    def process(self, element: tuple[int, Iterable[Packet]]) -> Iterator[tuple[int, Packet]]:
        yield from steps.lay_part(self._laid, *element, self._exchange)


class WriteShard(beam.DoFn):
    """(shard of the new table, its rows) -> Summary: it is written."""

    def __init__(self, laid: Laid) -> None:
        self._laid = laid

    def process(self, element: tuple[int, Iterable[Packet]]) -> Iterator[Summary]:
        yield Summary(shards={_TABLE: (steps.write_laid(self._laid, *element),)})


def _make(plan: Plan, beam_options: Sequence[str], say: Progress) -> Manifest:
    out, shards = plan.inputs.out, plan.queries.shards
    storage.remove(staging(out), recursive=True)
    unpublish(out)
    try:
        counts = _count(plan, beam_options)
        laid = _lay(plan, counts)
        layout = laid.layout
        parts = f" in {plan.tree.parts} parts" if plan.tree.parts > 1 else ""
        say(f"{plan.inputs.name}: {plan.queries.rows:,} queries{parts}, {layout.clusters:,} clusters of {layout.rows}")
        pipeline = make_pipeline(beam_options)
        exchange = choose(pipeline.runner, staging(out))
        _wire(pipeline, laid, exchange, range(len(shards)))
        run_pipeline(pipeline)
        summary = Summary.from_json(storage.read_bytes(plan.summary))
    finally:
        storage.remove(staging(out), recursive=True)
    manifest = _publish(laid, summary)
    say(f"{plan.inputs.name}: clustered{say_use(plan.inputs.use_from)}")
    return manifest


def _count(plan: Plan, beam_options: Sequence[str]) -> list[int]:
    """Rows of each part: counted where there are several."""
    if plan.tree.parts == 1:
        return [plan.queries.rows]
    pipeline = make_pipeline(beam_options)
    (
        pipeline
        | "Shards" >> beam.Create(range(len(plan.queries.shards)))
        | "Count parts" >> beam.ParDo(CountParts(plan))
        | "Merge summaries" >> beam.CombineGlobally(MergeSummaries())
        | "Write summary" >> beam.ParDo(WriteSummary(plan.summary))
    )
    run_pipeline(pipeline)
    found: Counter[str] = Summary.from_json(storage.read_bytes(plan.summary)).counters.get(_PARTS, Counter())
    return [found[str(part)] for part in range(plan.tree.parts)]


def _lay(plan: Plan, counts: list[int]) -> Laid:
    queries, url = plan.queries, plan.inputs.source.queries_url
    shard_rows = max(1, queries.rows // len(queries.shards))
    layout = make_layout(counts, plan.size, queries.row_group_rows or 1, shard_rows, plan.seed)
    file = open_shard(url, queries.shards[0])
    try:
        return Laid(plan, layout, file.schema_arrow)
    finally:
        file.close()


def _wire(pipeline: beam.Pipeline, laid: Laid, exchange: Exchange, shards: range) -> None:
    (
        pipeline
        | "Shards" >> beam.Create(shards)
        | "Deal rows" >> beam.ParDo(DealRows(laid, exchange))
        | "By part" >> beam.GroupByKey()
        | "Cluster" >> beam.ParDo(LayClusters(laid, exchange))
        | "By shard" >> beam.GroupByKey()
        | "Write shards" >> beam.ParDo(WriteShard(laid))
        | "Merge summaries" >> beam.CombineGlobally(MergeSummaries())
        | "Write summary" >> beam.ParDo(WriteSummary(laid.plan.summary))
    )


def _publish(laid: Laid, summary: Summary) -> Manifest:
    plan, layout = laid.plan, laid.layout
    parameters = plan.parameters()
    parameters[CLUSTERS] |= {"rows": layout.rows, "count": layout.clusters}
    rows = plan.queries.rows
    return publish(
        plan.inputs.out,
        Manifest(
            kind="queries",
            columns=columns_of(laid.schema),
            shards=summary.shards_of(_TABLE),
            rows=rows,
            row_group_rows=layout.row_group_rows,
            id_range=(0, rows),
            parents=plan.inputs.parents,
            parameters=parameters,
            counters={"rows": rows, "clusters": layout.clusters, "short_clusters": sum(layout.short)},
        ),
    )


def _finished(plan: Plan, options: ClusterOptions, run: str) -> Manifest | None:
    """The table if it is this very one, None where it is to be made. Raises InputError for one in the way."""
    out = plan.inputs.out
    if not is_published(out):
        return None
    found = open_manifest(out)
    if found.kind != "queries" or CLUSTERS not in found.parameters:
        raise InputError(f"{out}: holds a {found.kind} table. Choose another place with --out.")
    wanted, known = plan.parameters()[CLUSTERS], found.parameters[CLUSTERS]
    changed = [f"{name} {known.get(name)!r}, now {value!r}" for name, value in wanted.items() if known[name] != value]
    if found.parents == plan.inputs.parents and not changed:
        return found
    if found.parents != plan.inputs.parents:
        changed.append("other embeddings")
    # A dump that the trainer has written anew since: what was made from the old one is of no use.
    stale = plan.inputs.epoch is not None and known["epoch"] == plan.inputs.epoch and options.queries is None
    if not options.overwrite and not (stale and found.parents != plan.inputs.parents):
        raise InputError(
            f"{out}: holds a table made otherwise ({'; '.join(changed)}). Give the same options, another place with "
            "--out, or --overwrite to replace it."
        )
    require_unused(out, found, run)
    return None
