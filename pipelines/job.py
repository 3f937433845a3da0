"""Make a table: find it, or build it with flows in a temporary place and publish it; what workers report of their work.

Reports of workers (`Summary`) can be merged in any order.
"""

import functools
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from pipelines.flow import Collection, Flow, Packet, receive
from pipelines.formats.base import Reject
from pipelines.progress import Progress, Watch
from pipelines.runners.base import Runner
from pipelines.runners.local import choose_runner
from schemas import storage
from schemas.layout import staging
from schemas.manifest import Manifest, Patch, Shard, columns_of
from schemas.owners import Build, building, clean_up
from schemas.shard_files.parquet import open_shard
from schemas.storage import join, require_room
from schemas.table import Request

REMEDY = "Give another OUT, or remove the existing table first."
SUMMARY = "summary"  # tag of the collections of Summary
INPUT, REJECTED = "input/", "rejected/"  # prefixes of the counters of an input table: of rows, and of rejects by reason
SHOWN = 5  # number of rejects that a message shows


@dataclass(frozen=True, order=True)
class StagedBlock:
    """Rows of one raw block in staging: `sampled` contains the candidates for a sample, `rest` the other rows.

    mentions: the distinct label keys of the block's points (formats with keys only).
    """

    table: str
    part: int
    number: int
    sampled: Packet
    rest: Packet
    mentions: Packet | None = None

    def read(self) -> pa.RecordBatch:
        """Read all rows, and add a column `part`."""
        rows = pa.concat_batches(list(receive([self.sampled, self.rest])))
        return rows.append_column("part", pa.array(np.full(rows.num_rows, self.part, np.int32)))


@dataclass(frozen=True)
class Patched:
    """A patch to the earlier labels or points in shard `number` of the view, and the row groups of this shard."""

    table: str
    number: int
    kind: str
    patch: Patch
    groups: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Summary:
    """Shards and counters by table, the first rejects, and the contents of staging.

    blocks: parsed rows in staging. rejected: (input table, packet) of rejected rows in staging. files: (bytes, SHA-256)
    of each input file, by URL. features: the largest feature id of all rows, plus one. patched: changes to rows of
    earlier versions. kept: locations of packets for a later flow, by collection and key. label_sizes: number of labels
    of each shard.
    """

    shards: dict[str, tuple[Shard, ...]] = field(default_factory=dict)
    counters: dict[str, Counter[str]] = field(default_factory=dict)
    rejects: tuple[Reject, ...] = ()
    blocks: tuple[StagedBlock, ...] = ()
    rejected: tuple[tuple[str, Packet], ...] = ()
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    features: int = 0
    patched: tuple[Patched, ...] = ()
    kept: dict[str, dict[int, Packet]] = field(default_factory=dict)
    label_sizes: dict[int, int] = field(default_factory=dict)

    @classmethod
    def sum_of(cls, summaries: Iterable["Summary"]) -> "Summary":
        """Merge the summaries into one; the result does not depend on the order or the grouping."""
        many = list(summaries)
        kept: dict[str, dict[int, Packet]] = {}
        shards: dict[str, tuple[Shard, ...]] = {}
        counters: dict[str, Counter[str]] = {}
        for each in many:
            for table, counts in each.counters.items():
                counters.setdefault(table, Counter()).update(counts)
            for name, packets in each.kept.items():
                kept.setdefault(name, {}).update(packets)
            for table, some in each.shards.items():
                shards[table] = shards.get(table, ()) + some
        return cls(
            shards,
            counters,
            tuple(heapq.nsmallest(SHOWN, (reject for each in many for reject in each.rejects))),
            tuple(block for each in many for block in each.blocks),
            tuple(place for each in many for place in each.rejected),
            {url: known for each in many for url, known in each.files.items()},
            max((each.features for each in many), default=0),
            tuple(patch for each in many for patch in each.patched),
            kept,
            {shard: rows for each in many for shard, rows in each.label_sizes.items()},
        )

    def shards_of(self, table: str) -> tuple[Shard, ...]:
        """Return the table's shards in the order of their names."""
        return tuple(sorted(self.shards.get(table, ()), key=lambda shard: shard.path))

    def blocks_of(self, table: str) -> list[StagedBlock]:
        """Return the blocks of an input table in the order of their rows."""
        return sorted(block for block in self.blocks if block.table == table)

    def count(self, table: str, name: str) -> int:
        """Return a counter of a new table; 0 if nothing was counted."""
        return int(self.counters.get(table, Counter())[name])

    def count_input(self, table: str, name: str) -> int:
        """Return a counter of an input table from the first flow."""
        return self.count(INPUT + table, name)

    def reasons(self, table: str) -> dict[str, int]:
        """Count the rejects of an input table by reason."""
        return dict(sorted(self.counters.get(REJECTED + table, {}).items()))


as_json: Callable[[type], TypeAdapter[Any]] = functools.cache(TypeAdapter)  # reads and writes a dataclass


def write_sum(summaries: Collection, url: str) -> None:
    """End a flow: write the sum of the summaries to one small file at `url`, which the launching process reads."""
    summaries.map_partitions("Sum up", _add_up).group("All summaries").map("Write summary", _write_summary, url)


def _add_up(summaries: Iterable[Summary]) -> Iterator[tuple[int, Summary]]:
    yield 0, Summary.sum_of(summaries)


def _write_summary(element: tuple[int, Iterable[Summary]], url: str) -> None:
    storage.write_sealed(url, as_json(Summary).dump_json(Summary.sum_of(element[1])))


def read_summary(url: str) -> Summary:
    """Read the summary at `url`; an empty summary if a flow had nothing to do. Raises StorageError."""
    try:
        return as_json(Summary).validate_json(storage.read_sealed(url))
    except FileNotFoundError:
        return Summary()


def describe(
    request: Request,
    summary: Summary,
    schema: pa.Schema,
    row_group_rows: int | None,
    id_range: tuple[int, int] | None,
    table: str = "",
    **more: Any,
) -> Manifest:
    """Return the manifest for the requested table, built from the shards and counters in `summary`.

    table: name of the table in `summary`; default: the request's kind. more: other fields of the manifest.
    """
    shards = summary.shards_of(table or request.kind)
    facts = {
        "columns": columns_of(schema),
        "rows": sum(shard.rows for shard in shards),
        "row_group_rows": row_group_rows,
        "id_range": id_range,
        "parents": dict(request.parents or {}),
        "parameters": dict(request.parameters),
        "counters": dict(summary.counters.get(table or request.kind, {})),
    }
    return Manifest(kind=request.kind, shards=shards, **(facts | more))


def written_schema(out: str, summary: Summary, table: str) -> pa.Schema:
    """Read the schema from the first shard of `table` at `out`, because only the workers know the dimension."""
    with open_shard(out, summary.shards_of(table)[0]) as first:
        return first.schema_arrow


@dataclass(frozen=True)
class Job:
    """Job that makes one output, with the location of the output, the runner of flows, and the display of steps."""

    build: Build
    runner: Runner
    watch: Watch

    def run(self, name: str, steps: Mapping[str, int | None], wire: Callable[[Flow], Collection]) -> Summary:
        """Run the flow that `wire(flow)` builds, and return the sum of its summaries. `steps`: see `Watch.expect`."""
        flow, url = Flow(), join(self.watch.staging, f"{name.replace(' ', '-')}.json")
        write_sum(wire(flow), url)
        self.watch.expect(steps)
        self.runner.run(flow, self.watch)
        return read_summary(url)

    def run_step(self, step: str, rows: int | None, elements: Iterable[Any], *work: Any) -> Summary:
        """Run one step over `rows` rows. work: a function from element to Summary, and its other arguments."""
        return self.run(step, {step: rows}, lambda flow: flow.create(f"Elements of {step}", elements).map(step, *work))


def make_table(
    out: str,
    doing: str,
    find: Callable[[], Manifest | None],
    make: Callable[[Job], Manifest],
    beam_options: Sequence[str],
    say: Progress,
    *,
    needs: Mapping[str, int],
    remedy: str = "Choose another location.",
    urls: Sequence[str] = (),
    reads: Sequence[str] = (),
    in_phases: bool = False,
    worker_bytes: int = 1,
) -> Manifest:
    """Return the table that `find` finds at `out`, or otherwise the table that `make` publishes at `out`.

    `needs`: bytes that the table needs, by use. `urls`: URLs that the job uses. `reads`: URLs that workers must be able
    to read. `worker_bytes`: memory of a worker. Raises RoomError with a message that ends with `remedy`, ClaimedError,
    StorageError, and the errors of `find` and `make`.
    """
    if (finished := find()) is not None:
        clean_up(out, doing)
        return finished
    require_room(out, needs, remedy)
    runner = choose_runner(beam_options, urls, worker_bytes, say)
    with runner, building(out, doing, say, in_phases) as build:
        if (finished := find()) is not None:  # the previous owner of the claim may have made the table
            return finished
        job = Job(build, runner, Watch(staging(build.url), say))
        runner.check(reads, build.url, say)
        manifest = make(job)
        job.watch.summarize()
        return manifest
