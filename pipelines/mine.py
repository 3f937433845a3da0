"""`extremis mine`: hard-negative tables from a training run's own embeddings and classifier vectors.

    blocks of labels ─▶ search every query shard ─▶ group by shard ─▶ merge and write ─▶ sum up ─▶ publish

ASTRA's Algorithm 1 (papers: section 3.1), beside the training: `watch` mines each dump as the trainer completes it.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import apache_beam as beam

from pipelines.mining.dump import Dump, Source, complete_dumps, newest, open_dump
from pipelines.mining.index import tune
from pipelines.mining.options import MineOptions
from pipelines.mining.plan import Plan, make_plan
from pipelines.mining.steps import Found, Merged, load_block, merge_shard, negatives_schema, search_shard, summarize
from pipelines.runner import make_pipeline
from pipelines.runner import run as run_pipeline
from schemas import storage
from schemas.errors import ExtremisError
from schemas.layout import RunLayout
from schemas.manifest import Manifest, Shard, columns_of, is_published, open_manifest, publish, unpublish

__all__ = ["MineOptions", "mine", "watch"]

Progress = Callable[[str], None]


def mine(
    data: str,
    run: str,
    epoch: int | None = None,
    options: MineOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Manifest]:
    """Make the negative tables of one dump (the newest complete one by default): manifests by source.

    A table that was already made from the same queries, embeddings and vectors is returned as it is. `beam_options` go
    to Beam; `progress` gets a line a step. Raises InputError (no dump, wrong options), TableError (a dump that is
    unfinished, damaged, or of other data), StorageError.
    """
    say = progress or _silent
    dump = open_dump(data, run, newest(run) if epoch is None else epoch)
    made = _existing(dump, run)
    missing = tuple(source for source in dump.sources if source.name not in made)
    if not missing:
        say(f"epoch {dump.epoch}: already mined, for use from epoch {dump.use_from}")
        return made
    plan = make_plan(dump, missing, run, options or MineOptions())
    started = time.monotonic()
    rows = sum(source.queries.rows for source in missing)
    say(
        f"epoch {dump.epoch}: {rows:,} rows against {dump.labels:,} vectors "
        f"in {len(plan.bounds)} block(s), index {plan.index}, K={plan.width}"
    )
    storage.remove(plan.scratch, recursive=True)
    for source in missing:
        unpublish(plan.table(source))
    pipeline = make_pipeline(beam_options)
    _wire(pipeline, plan)
    run_pipeline(pipeline)
    # `queries` last: whoever finds its table finds the others, too.
    for source in sorted(missing, key=lambda one: one.name == "queries"):
        made[source.name] = _publish(plan, source)
    storage.remove(plan.scratch, recursive=True)
    say(f"epoch {dump.epoch}: mined in {time.monotonic() - started:.1f} s, for use from epoch {dump.use_from}")
    return made


def watch(
    data: str,
    run: str,
    options: MineOptions | None = None,
    beam_options: Sequence[str] = (),
    poll_seconds: float = 0.5,
    until: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> int:
    """Mine every complete dump that has no table, oldest first, until the run is finished or `until()` is true.

    Returns the number of dumps mined. A dump that the trainer takes back while it is mined (it resumed from an earlier
    checkpoint) is left and taken up again when it is complete. Raises as `mine`.
    """
    seen: dict[int, str] = {}
    mined = 0
    while not (storage.exists(RunLayout(run).finished) or (until is not None and until())):
        new = [(epoch, digest) for epoch, digest in complete_dumps(run).items() if seen.get(epoch) != digest]
        if not new:
            time.sleep(poll_seconds)
            continue
        epoch, digest = new[0]
        try:
            dump = open_dump(data, run, epoch)
            if len(_existing(dump, run)) < len(dump.sources):
                mine(data, run, epoch, options, beam_options, progress)
                mined += 1
            seen[epoch] = digest
        except ExtremisError:
            if complete_dumps(run).get(epoch) == digest:
                raise
    return mined


class SearchBlock(beam.DoFn):
    """(block, its query shards) -> ((source, shard), Found): an index is built, searched for all, discarded."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def setup(self) -> None:
        tune(self._plan.options.threads)

    def process(self, task: tuple[int, list[tuple[int, int]]]) -> Iterator[tuple[tuple[int, int], Found]]:
        number, shards = task
        block = load_block(self._plan, number)
        for source, shard in shards:
            yield (source, shard), search_shard(self._plan, number, block, self._plan.sources[source], shard)


class MergeShard(beam.DoFn):
    """((source, shard), what each block found) -> (source, Merged): the table's shard is written."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def process(self, element: tuple[tuple[int, int], Iterable[Found]]) -> Iterator[tuple[int, Merged]]:
        (source, shard), found = element
        yield source, merge_shard(self._plan, self._plan.sources[source], shard, found)


class Summarize(beam.DoFn):
    """(source, its shards) -> nothing: the summary is written for the launching process."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def process(self, element: tuple[int, Iterable[Merged]]) -> None:
        source, merged = element
        storage.write_bytes(self._plan.summary(self._plan.sources[source]), summarize(merged, self._plan.width))


def _wire(pipeline: beam.Pipeline, plan: Plan) -> None:
    (
        pipeline
        | "Blocks" >> beam.Create(plan.tasks())
        | "Search blocks" >> beam.ParDo(SearchBlock(plan))
        | "Group by shard" >> beam.GroupByKey()
        | "Merge shards" >> beam.ParDo(MergeShard(plan))
        | "Group by table" >> beam.GroupByKey()
        | "Sum up" >> beam.ParDo(Summarize(plan))
    )


def _publish(plan: Plan, source: Source) -> Manifest:
    summary: dict[str, Any] = json.loads(storage.read_bytes(plan.summary(source)))
    shards = tuple(Shard(**entry) for entry in summary["shards"])
    manifest = Manifest(
        kind="negatives",
        columns=columns_of(negatives_schema(plan)),
        shards=shards,
        rows=sum(shard.rows for shard in shards),
        row_group_rows=source.queries.row_group_rows,
        id_range=source.queries.id_range,
        parents=plan.dump.parents(source),
        parameters=plan.parameters(),
        counters=summary["counters"],
        quality=summary["quality"],
    )
    return publish(plan.table(source), manifest)


def _existing(dump: Dump, run: str) -> dict[str, Manifest]:
    """Tables that were already made from this very dump, by source."""
    found: dict[str, Manifest] = {}
    for source in dump.sources:
        url = RunLayout(run).negatives(dump.use_from, source.name)
        if is_published(url):
            manifest = open_manifest(url, "negatives")
            if manifest.parents == dump.parents(source):
                found[source.name] = manifest
    return found


def _silent(line: str) -> None:
    pass
