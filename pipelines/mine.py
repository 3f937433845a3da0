"""`extremis mine`: hard-negative tables from a training run's own embeddings and classifier vectors.

    blocks of labels ─▶ search every query shard ─▶ group by shard ─▶ merge and write ─▶ sum up ─▶ publish

ASTRA's Algorithm 1 (papers: section 3.1), beside the training: `watch` mines each dump as the trainer completes it.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import apache_beam as beam

from pipelines.common.aligned import Source
from pipelines.common.claim import claimed
from pipelines.common.progress import Progress, say_use, silent
from pipelines.common.watch import watch_dumps
from pipelines.mining import steps
from pipelines.mining.inputs import complete_dumps, open_inputs
from pipelines.mining.kept_index import Kept, existing_index, publish_index
from pipelines.mining.options import MineOptions
from pipelines.mining.overlap import find_previous
from pipelines.mining.plan import Plan, Task, make_plan
from pipelines.mining.profile import Spent, release
from pipelines.mining.reuse import finished, mined
from pipelines.runners.runner import make_pipeline
from pipelines.runners.runner import run as run_pipeline
from schemas import storage
from schemas.manifest import Manifest, Shard, columns_of, publish, unpublish
from schemas.sizes import say_bytes
from schemas.storage import join

__all__ = ["MineOptions", "mine", "watch"]

SPENT = "spent.json"  # beside the tables of a refresh

# Runners may give a worker process several threads; the memory that was planned is that of one work item at a time.
_ONE_AT_A_TIME = threading.Lock()


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
    say, options = progress or silent, options or MineOptions()
    inputs = open_inputs(data, run, epoch, options)
    previous = {source.name: find_previous(run, source, inputs.use_from) for source in inputs.sources}
    plan = make_plan(inputs, options, {name: table for name, table in previous.items() if table is not None})
    made = finished(plan, run)
    missing = tuple(source for source in inputs.sources if source.name not in made)
    index_url = options.keep_index
    if index_url is not None and existing_index(plan, index_url, options.overwrite) is not None:
        index_url = None
    if not missing and index_url is None:
        say(f"{inputs.name}: already mined{say_use(inputs.use_from)}")
        return made
    with claimed(inputs.root):
        made = finished(plan, run)  # whoever held the claim before may have made some
        missing = tuple(source for source in inputs.sources if source.name not in made)
        if not missing and index_url is None:
            return made
        return {**made, **_make(plan.only(missing), index_url, beam_options, say)}


def _make(plan: Plan, index_url: str | None, beam_options: Sequence[str], say: Progress) -> dict[str, Manifest]:
    """Mine and publish the tables of the plan's sources, and the index at `index_url` where one is to be kept."""
    started = time.monotonic()
    inputs, missing = plan.inputs, plan.sources
    made: dict[str, Manifest] = {}
    for line in plan.describe():
        say(line)
    storage.remove(inputs.scratch, recursive=True)
    for source in missing:
        unpublish(inputs.table(source))
    if index_url is not None:
        unpublish(index_url)
    pipeline = make_pipeline(beam_options)
    _wire(pipeline, plan, index_url)
    run_pipeline(pipeline)
    if index_url is not None:
        publish_index(plan, index_url, [_kept(plan, block) for block in range(len(plan.bounds))])
    spent = {source.name: _summary(plan, source)["spent"] for source in missing}
    # `queries` last: whoever finds its table finds the others, too.
    for source in sorted(missing, key=lambda one: one.name == "queries"):
        made[source.name] = _publish(plan, source)
    seconds = time.monotonic() - started
    if missing:
        body = {"seconds": round(seconds, 3), "estimated_bytes": plan.estimate.total, "tables": spent}
        storage.write_bytes(join(inputs.root, SPENT), json.dumps(body, indent=1, sort_keys=True).encode())
    storage.remove(inputs.scratch, recursive=True)
    peak = max((one["peak_bytes"] for one in spent.values()), default=0)
    memory = f", at most {say_bytes(peak)} in one process" if peak else ""
    say(f"{inputs.name}: mined in {seconds:.1f} s{memory}{say_use(inputs.use_from)}")
    return made


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
        if all(mined(inputs, source) is not None for source in inputs.sources):
            return False
        mine(data, run, epoch, options, beam_options, say)
        return True

    return watch_dumps(run, lambda: complete_dumps(run), make, say, poll_seconds, until)


class SearchBlock(beam.DoFn):
    """(block, its query shards) -> ((source, shard), Found): an index is built, searched for all, discarded."""

    def __init__(self, plan: Plan, index_url: str | None) -> None:
        self._plan, self._index_url = plan, index_url

    def process(self, task: Task) -> Iterator[tuple[tuple[int, int], steps.Found]]:
        plan, (number, keep, shards) = self._plan, task
        with _ONE_AT_A_TIME:
            spent = Spent()
            loaded = steps.load_block(plan, number, spent)
            if keep and self._index_url is not None:
                with spent.stage("keep index"):
                    steps.keep_block(plan, self._index_url, loaded)
            for source, shard in shards:
                yield (source, shard), steps.search_shard(plan, loaded, plan.sources[source], shard, spent)
                spent = Spent()
            del loaded
            release()


class MergeShard(beam.DoFn):
    """((source, shard), what each block found) -> (source, Merged): the table's shard is written."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def process(self, element: tuple[tuple[int, int], Iterable[steps.Found]]) -> Iterator[tuple[int, steps.Merged]]:
        (source, shard), found = element
        with _ONE_AT_A_TIME:
            merged = steps.merge_shard(self._plan, self._plan.sources[source], shard, found)
        yield source, merged


class Summarize(beam.DoFn):
    """(source, its shards) -> nothing: the summary is written for the launching process."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def process(self, element: tuple[int, Iterable[steps.Merged]]) -> None:
        plan, (source, merged) = self._plan, element
        name = plan.sources[source]
        storage.write_bytes(plan.summary(name), steps.summarize(plan, name, merged), durable=False)


def _wire(pipeline: beam.Pipeline, plan: Plan, index_url: str | None) -> None:
    (
        pipeline
        | "Blocks" >> beam.Create(plan.tasks(keep=index_url is not None))
        | "Search blocks" >> beam.ParDo(SearchBlock(plan, index_url))
        | "Group by shard" >> beam.GroupByKey()
        | "Merge shards" >> beam.ParDo(MergeShard(plan))
        | "Group by table" >> beam.GroupByKey()
        | "Sum up" >> beam.ParDo(Summarize(plan))
    )


def _publish(plan: Plan, source: Source) -> Manifest:
    summary = _summary(plan, source)
    shards = tuple(Shard(**entry) for entry in summary["shards"])
    manifest = Manifest(
        kind="negatives",
        columns=columns_of(plan.schema),
        shards=shards,
        rows=sum(shard.rows for shard in shards),
        row_group_rows=source.queries.row_group_rows,
        id_range=source.queries.id_range,
        parents=plan.inputs.parents(source),
        parameters=plan.parameters(),
        counters=summary["counters"],
        quality=summary["quality"],
    )
    return publish(plan.inputs.table(source), manifest)


def _summary(plan: Plan, source: Source) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(storage.read_bytes(plan.summary(source)))
    return body


def _kept(plan: Plan, block: int) -> Kept:
    note = json.loads(storage.read_bytes(plan.kept(block)))
    return Kept(Shard(**note["entry"]), note["effort"])
