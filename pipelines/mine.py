"""`extremis mine`: hard-negative tables from a training run's own embeddings and classifier vectors.

    blocks of labels ─▶ search every query shard ─▶ group by shard ─▶ merge and write ─▶ sum up ─▶ publish

ASTRA's Algorithm 1 (papers: section 3.1), beside the training: `watch` mines each dump as the trainer completes it.
"""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pipelines.common.dumps import watch_dumps
from pipelines.common.flow import Flow
from pipelines.common.progress import Progress, Watch, say_use, silent
from pipelines.common.vectors import Source
from pipelines.mining import steps
from pipelines.mining.audit import find_previous
from pipelines.mining.inputs import complete_dumps, open_inputs
from pipelines.mining.kept_index import describe_index, find_index
from pipelines.mining.plan import MinePlan, make_plan
from pipelines.options import MineOptions
from pipelines.runners.runner import Runner, choose_runner, for_workers
from schemas import storage
from schemas.layout import SPENT
from schemas.manifest import Manifest, Shard, columns_of, manifest_url
from schemas.owners.build import Build, building, clean_up
from schemas.owners.place import require_place
from schemas.reuse import find_by_parents
from schemas.sizes import say_bytes
from schemas.storage import join

__all__ = ["MineOptions", "mine", "watch"]


def mine(
    data: str,
    run: str,
    epoch: int | None = None,
    options: MineOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Manifest]:
    """Make the negative tables of one dump (the newest complete one by default): manifests by source.

    A table that was already made from the same queries, embeddings and vectors with the same options is returned as it
    is. `beam_options` go to Beam; `progress` gets a line a step. Raises InputError (no dump, wrong options, a plan that
    does not fit into the memory, a table made with other options), TableError (a dump that is unfinished, damaged, or
    of other data), StorageError.
    """
    say, place = progress or silent, functools.partial(for_workers, beam_options)
    data, run, options = place(data), place(run), (options or MineOptions()).for_workers(place)
    inputs = open_inputs(data, run, epoch, options)
    for out, doing in ((options.out, "mined"), (options.keep_index, "indexed")):
        if out is not None:
            require_place(out, doing, [data, run])
    previous = {source.name: find_previous(run, source, inputs.use_from) for source in inputs.sources}
    plan = make_plan(inputs, options, {name: table for name, table in previous.items() if table is not None})
    finished = plan.finished_tables(run)
    index_url = options.keep_index
    plan.require_room(finished)
    if index_url is not None and find_index(plan, index_url) is not None:
        index_url = None
    if len(finished) == len(plan.sources) and index_url is None:
        clean_up(inputs.root, "mined")
        say(f"{inputs.name}: already mined{say_use(inputs.use_from)}")
        return finished
    with contextlib.ExitStack() as held:
        runner = held.enter_context(choose_runner(beam_options))
        build = held.enter_context(building(inputs.root, "mined", say))
        finished = plan.finished_tables(run)  # the last owner may have made some
        missing = tuple(source for source in inputs.sources if source.name not in finished)
        index = held.enter_context(building(index_url, "indexed", say)) if index_url is not None else None
        if missing or index is not None:
            finished |= _make(plan.only(missing).below(build.claim.attempt), build, index, runner, say)
        return finished


def watch(
    data: str,
    run: str,
    options: MineOptions | None = None,
    beam_options: Sequence[str] = (),
    poll_seconds: float | None = None,
    until: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> int:
    """Mine every complete dump that has no table, oldest first, until the run is finished or `until()` is true.

    Returns the number of dumps mined. A dump that the trainer takes back while it is mined (it resumed from an earlier
    checkpoint) is left and taken up again when it is complete; one that another process is mining is left to it. Tables
    that a dump has already are left as they are, whatever their options. Storage that fails is waited for, and a dump
    whose mining fails is tried again, RETRIES times in a row. Raises as `mine`.
    """
    say, options = progress or silent, options or MineOptions()

    def make(epoch: int) -> bool:
        inputs = open_inputs(data, run, epoch, options)
        if all(find_by_parents(inputs.table(s), "negatives", inputs.parents(s)) for s in inputs.sources):
            return False
        mine(data, run, epoch, options, beam_options, say)
        return True

    return watch_dumps(run, lambda: complete_dumps(run), make, say, poll_seconds, until)


def _make(plan: MinePlan, build: Build, index: Build | None, runner: Runner, say: Progress) -> dict[str, Manifest]:
    """Mine and publish the tables of the plan's sources, and an index where one is to be kept."""
    started = time.monotonic()
    inputs = plan.inputs
    for line in plan.describe():
        say(line)
    reads = [manifest_url(table.url) for table in (inputs.vectors, *(source.queries for source in plan.sources))]
    runner.check(reads, build.url, say)
    watch = Watch(inputs.scratch, say)
    watch.expect(_steps(plan))
    runner.run(_flow(replace(plan, meter=watch.meter), index.url if index is not None else None), watch)
    if index is not None:
        index.publish(describe_index(plan))
    summaries = {source.name: json.loads(storage.read_sealed(plan.summary(source))) for source in plan.sources}
    # `queries` last: a reader that sees its table sees the others, too.
    ordered = sorted(plan.sources, key=lambda source: source.name == "queries")
    made = {source.name: _describe(plan, source, summaries[source.name]) for source in ordered}
    for source in ordered:
        Build(inputs.table(source), inputs.written(source), build.claim).publish(made[source.name])
    seconds = time.monotonic() - started
    profiles = {name: summary["profile"] for name, summary in summaries.items()}
    if profiles:
        body = {"seconds": round(seconds, 3), "estimated_bytes": plan.estimate.total, "tables": profiles}
        storage.write_bytes(join(inputs.root, SPENT), json.dumps(body, indent=1, sort_keys=True).encode())
    watch.summarize()
    peak = max((profile["peak_bytes"] for profile in profiles.values()), default=0)
    memory = f", at most {say_bytes(peak)} in one process" if peak else ""
    say(f"{inputs.name}: mined in {seconds:.1f} s{memory}{say_use(inputs.use_from)}")
    return made


def _steps(plan: MinePlan) -> dict[str, int | None]:
    """Name the steps, with their rows: vectors, queries by block, queries."""
    rows = sum(source.queries.rows for source in plan.sources)
    sizes = [stop - start for start, stop in plan.bounds]
    indexed = sum(sizes[block] for block, _, _ in plan.tasks())
    return {steps.INDEX: indexed, steps.SEARCH: rows * len(sizes), steps.MERGE: rows}


def _flow(plan: MinePlan, index_url: str | None) -> Flow:
    flow = Flow()
    tasks = flow.create("Blocks", plan.tasks(keep=index_url is not None))
    candidates = tasks.flat_map("Search blocks", steps.search_block, plan, index_url).group("Group by shard")
    merged = candidates.map("Merge shards", steps.merge_shard, plan).group("Group by table")
    merged.map("Sum up", steps.write_summary, plan)
    return flow


def _describe(plan: MinePlan, source: Source, summary: dict[str, Any]) -> Manifest:
    shards = tuple(Shard(**entry) for entry in summary["shards"])
    return Manifest(
        kind="negatives",
        columns=columns_of(plan.schema),
        shards=shards,
        rows=sum(shard.rows for shard in shards),
        row_group_rows=source.queries.manifest.row_group_rows,
        id_range=source.queries.manifest.id_range,
        parents=plan.inputs.parents(source),
        parameters=plan.parameters(),
        counters=summary["counters"],
        quality=summary["quality"],
    )
