"""`extremis mine`: mine hard-negative tables from a training run's own embeddings and classifier vectors.

    groups of blocks ─▶ search the pass's query shards ─▶ group by shard ─▶ merge and write ─▶ next pass … ─▶ publish

A block is a range of labels that is indexed as one, a group the blocks that a worker has in memory together, a pass the
query shards whose candidates are in storage at a time. A source is a table of points (`queries`, or label texts) that
gets its own table of negatives. An interrupted run continues from its finished shards. In ASTRA's Algorithm 1 (section
3.1 of the paper), mining runs during training: `watch` mines each dump as soon as the trainer completes it.
"""

import functools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipelines.dumps import watch_dumps
from pipelines.flow import Flow
from pipelines.formats.base import require_unchanged
from pipelines.job import Summary, describe
from pipelines.memory import keep_memory, with_memory
from pipelines.mining import search
from pipelines.mining.audit import find_previous
from pipelines.mining.filters import find_aliases
from pipelines.mining.inputs import MineInputs, complete_dumps, open_inputs
from pipelines.mining.plan import MinePlan, make_plan
from pipelines.mining.search import find_unfinished, summarize, take_over
from pipelines.options import MineOptions
from pipelines.progress import Progress, Watch, say_use, silent
from pipelines.runners.base import Runner
from pipelines.runners.local import choose_runner, for_workers, is_local
from schemas import storage
from schemas.layout import MINING_COST
from schemas.manifest import Manifest
from schemas.owners import Build, building, clean_up, require_output_folder
from schemas.sizes import say_bytes
from schemas.storage import join
from schemas.table import Request, find_by_parents

__all__ = ["MineOptions", "mine", "watch"]


def mine(
    data: str,
    run: str,
    epoch: int | None = None,
    options: MineOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Manifest]:
    """Mine the tables of one dump (the newest complete dump by default). Returns manifests by source.

    If a table was already built from the same queries, embeddings and vectors with the same options, it is returned.
    `beam_options` are passed to Beam; `progress` receives one line per step. Raises InputError (no dump, invalid
    options, a plan that does not fit into memory, a table built with other options), TableError (a dump that is
    unfinished, damaged, or from other data), StorageError.
    """
    say, shared = progress or silent, functools.partial(for_workers, beam_options)
    data, run, options = shared(data), shared(run), (options or MineOptions()).for_workers(shared)
    inputs = open_inputs(data, run, epoch, options)
    if options.out is not None:
        require_output_folder(options.out, "mined", [data, run])
    return mine_inputs(inputs, run, options, beam_options, say)


def mine_inputs(
    inputs: MineInputs, run: str | None, options: MineOptions, beam_options: Sequence[str], say: Progress
) -> dict[str, Manifest]:
    """Mine the tables of `inputs`: a dump of `run`, or, with None, vectors of any model. See `mine`."""
    previous = {} if run is None else find_previous(run, inputs.sources, inputs.use_from)
    here, folder = is_local(beam_options), inputs.root if run is None or options.out else run
    planned = with_memory(options, folder, here, say)
    plan = make_plan(inputs, planned, previous)
    finished = plan.finished_tables(run)
    if len(finished) == len(plan.sources):
        clean_up(inputs.root, "mined")
        say(f"{inputs.name}: already mined{say_use(inputs.use_from)}")
        return finished
    left = plan.without_sources(finished)
    left.require_room(*find_unfinished(left), here)
    runner = choose_runner(beam_options, worker_bytes=plan.estimate.total, say=say)
    with runner, building(inputs.root, "mined", say, in_phases=True) as build:
        keep_memory(options, planned.memory, folder)
        finished = plan.finished_tables(run)  # the previous owner may have made some tables
        left = plan.without_sources(finished)
        left = replace(left, inputs=replace(inputs, attempt=build.claim.attempt))
        return finished | _make(left, build, runner, here, say) if left.sources else finished


def watch(
    data: str,
    run: str,
    options: MineOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> int:
    """Mine every complete dump that has no table, oldest first, until the run is finished, as `watch_dumps` does.

    Returns the number of mined dumps. Existing tables of a dump are kept, even if they were built with other options.
    Raises the errors of `mine`.
    """
    say, options = progress or silent, options or MineOptions()

    def make(epoch: int) -> dict[str, Manifest]:
        inputs = open_inputs(data, run, epoch, options)
        if all(find_by_parents(inputs.table_url(s), "negatives", inputs.parents(s)) for s in inputs.sources):
            return {}
        return mine(data, run, epoch, options, beam_options, say)

    return watch_dumps(run, "mined", lambda: complete_dumps(run), make, say)


def _make(plan: MinePlan, build: Build, runner: Runner, here: bool, say: Progress) -> dict[str, Manifest]:
    """Mine and publish the tables of the plan's sources."""
    started, inputs = time.monotonic(), plan.inputs
    for line in plan.describe():
        say(line)
    take_over(plan)
    tables = inputs.vectors, *(source.queries for source in plan.sources)
    runner.check([table.shard_url(0) for table in tables if table.shards], build.url, say)
    watch = Watch(inputs.scratch, say)
    plan = replace(plan, meter=watch.meter)
    if (aliases := find_aliases(inputs.texts, plan.options.equal_texts)) is not None:
        aliases.write(plan.alias_url)
    _run_passes(plan, runner, watch, here, say)
    require_unchanged(inputs.files)
    made, profiles = dict[str, Manifest](), dict[str, Any]()
    # `queries` is published last: a reader that sees its table also sees the other tables.
    ordered = sorted(plan.sources, key=lambda source: source.name == "queries")
    for source in ordered:
        found, queries = summarize(plan, source), source.queries.manifest
        request = Request("negatives", inputs.parents(source), plan.parameters())
        summary = Summary({request.kind: found["shards"]}, {request.kind: found["counters"]})
        made[source.name] = describe(
            request, summary, plan.schema, queries.row_group_rows, queries.id_range, quality=found["quality"]
        )
        profiles[source.name] = found["profile"]
    for source in ordered:
        Build(inputs.table_url(source), plan.staged_table_url(source), build.claim).publish(made[source.name])
    seconds = time.monotonic() - started
    body = {"seconds": round(seconds, 3), "memory": plan.options.memory, "estimated_bytes": plan.estimate.total}
    content = json.dumps(body | {"tables": profiles}, indent=1, sort_keys=True).encode()
    storage.write_bytes(join(inputs.root, MINING_COST), content)
    watch.summarize()
    peak = max(profile["peak_bytes"] for profile in profiles.values())
    memory = f", at most {say_bytes(peak)} in one process" if peak else ""
    say(f"{inputs.name}: mined in {seconds:.1f} s{memory}{say_use(inputs.use_from)}")
    return made


def _run_passes(plan: MinePlan, runner: Runner, watch: Watch, here: bool, say: Progress) -> None:
    """Finish all unfinished shards, pass by pass; remove the candidates after each pass."""
    left, _ = find_unfinished(plan)
    if done := len(plan.source_shards) - len(left):
        say(f"{plan.inputs.name}: resuming, {done:,} of {len(plan.source_shards):,} shards are finished")
    passes = plan.passes(left)
    rows, sizes = plan.rows(left), [plan.bounds[stop - 1][1] - plan.bounds[first][0] for first, stop in plan.groups]
    expected: dict[str, int | None] = {search.POSITIVES: rows * len(sizes)} if plan.scores_positives else {}
    expected[search.INDEX] = sum(sizes[group] for some in passes for group, _, _ in plan.tasks(some))
    expected |= {search.SEARCH: rows * len(plan.bounds), search.MERGE: rows}
    for number, source_shards in enumerate(passes):
        if number:
            say(f"{plan.inputs.name}: pass {number + 1} of {len(passes)}")
        plan.require_room(*find_unfinished(plan), here, begun=True)
        watch.expect(expected)
        keep = number == 0 and len(passes) > 1 and not plan.factory.exact  # later passes read the stored indexes
        if plan.scores_positives:
            flow = Flow()
            flow.create("Groups", plan.tasks(source_shards)).map("Score positives", search.score_group, plan)
            runner.run(flow, watch)
            watch.expect(expected)
        flow = Flow()
        groups = flow.create("Groups", plan.tasks(source_shards, keep))
        candidates = groups.flat_map("Search groups", search.search_group, plan)
        if not plan.has_one_group:
            candidates.group("Group by shard").map("Merge shards", search.merge_shard, plan)
        runner.run(flow, watch)
        storage.remove(plan.inputs.candidates_root, recursive=True)
