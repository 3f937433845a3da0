"""Plan of one mining run: every choice, made once in the launching process, so that all workers agree."""

import functools
import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from pipelines.common.dumps import require_unused
from pipelines.common.progress import Meter
from pipelines.common.vectors import Source, equal_ranges
from pipelines.mining.candidates import fetched
from pipelines.mining.inputs import MineInputs
from pipelines.mining.memory import Blocks, settle, sizes_of
from pipelines.options import MineOptions
from schemas import arrow
from schemas.errors import InputError
from schemas.layout import shard_name, staging
from schemas.manifest import Manifest
from schemas.reuse import Request, find_reusable
from schemas.sizes import require_room, say_bytes
from schemas.storage import join
from schemas.table import Table
from search import index
from search.candidates import MOST_LABELS
from search.factory import AUTO
from search.index import SearchParams

_FEWEST_AUDITED = 200
_MOST_AUDITED = 1000
# Options that decide the content of a table as they are; those of a search decide that of a kept index, too.
SEARCH_OPTIONS = ("nprobe", "ef_search", "refine", "target_recall", "seed")
_RANK_OPTIONS = ("skip_top", "window", "margin", "relative_margin", "audit_queries")

Task = tuple[int, bool, list[tuple[int, int]]]


@dataclass(frozen=True)
class MinePlan(Blocks):
    """The search of one run, and where its tables go.

    `width` is K of one range, `fetch` the candidates that a row needs of each block.
    """

    inputs: MineInputs
    sources: tuple[Source, ...]
    width: int
    fetch: int
    params: SearchParams
    previous: dict[str, Table]
    options: MineOptions
    meter: Meter = field(default=Meter(), compare=False)

    @property
    def columns(self) -> int:
        """Columns of the finished table."""
        return self.width * self.options.ranges

    @property
    def sole(self) -> bool:
        """Tell whether one block holds all labels: what is found there is the table, with nothing to merge."""
        return len(self.bounds) == 1

    @property
    def dimension(self) -> int:
        """Columns of vectors and queries in memory."""
        return self.factory.dimension(self.inputs.dimension)

    @property
    def schema(self) -> pa.Schema:
        """Schema of the finished tables."""
        return arrow.negatives(self.columns, arrow.label_type(self.inputs.labels))

    def only(self, sources: tuple[Source, ...]) -> "MinePlan":
        """Return the plan for these sources alone: a table is the same, whatever others are made with it."""
        return replace(self, sources=sources)

    def below(self, attempt: str) -> "MinePlan":
        """Return the plan of an attempt of this name."""
        return replace(self, inputs=replace(self.inputs, attempt=attempt))

    def audited(self, source: Source) -> int:
        """Return how many rows are searched exactly, too: by default one in 400, so that the audit costs little."""
        if self.options.audit_queries is not None:
            return self.options.audit_queries
        return max(_FEWEST_AUDITED, min(_MOST_AUDITED, source.queries.rows // 400))

    def candidates(self, source: Source, shard: int, block: int) -> str:
        """Return the URL of the candidates of one block, which are kept until the merge."""
        folder = join(self.inputs.scratch, source.name, shard_name(block, len(self.bounds), "block"))
        return join(folder, shard_name(shard, len(source.queries.shards), "keys"))

    def summary(self, source: Source) -> str:
        """Return the URL of what the workers report of a table to the launching process."""
        return join(self.inputs.scratch, f"{source.name}.json")

    def kept(self, block: int) -> str:
        """Return the URL of what a worker reports of the index that it kept."""
        return join(self.inputs.scratch, shard_name(block, len(self.bounds), "json"))

    def tasks(self, keep: bool = False) -> list[Task]:
        """List (block, whether to keep its index, [(source, shard), ...]): each block against every query shard.

        A block makes `tasks_per_block` work items, or one where there are fewer shards.
        """
        shards = [(s, i) for s, source in enumerate(self.sources) for i in range(len(source.queries.shards))]
        splits = max(1, min(self.options.tasks_per_block, len(shards)))
        return [
            (block, keep and split == 0, shards[split::splits])
            for block in range(len(self.bounds))
            for split in range(splits)
        ]

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of a table's manifest: all that decides its content, besides its parents."""
        options, inputs = self.options, self.inputs
        return {
            **options.model_dump(include={*SEARCH_OPTIONS, *_RANK_OPTIONS}),
            "by": inputs.by,
            "width": self.width,
            "ranges": [list(bounds) for bounds in equal_ranges(0, inputs.labels, options.ranges)],
            "index": self.factory.spec,
            "block_rows": self.block_rows,
            "blocks": len(self.bounds),
            "query_batch": self.batch,
            "epoch": inputs.epoch,
            "step": inputs.requested.get("step"),
            "use_from": inputs.use_from,
            "labels": inputs.labels,
        }

    def require_room(self, finished: Container[str]) -> None:
        """Refuse tables that do not fit where they are written, but those that are `finished`. Raises InputError."""
        rows = sum(source.queries.rows for source in self.sources if source.name not in finished)
        bits = rows * self.columns * math.log2(max(2, self.inputs.labels))
        remedy = "Remove tables of earlier epochs, mine fewer negatives (--width), or choose another place for RUN."
        require_room(self.inputs.root, {"tables": int(bits) // 8}, remedy)

    def finished_tables(self, run: str) -> dict[str, Manifest]:
        """Return the tables that need not be made, by source.

        A table is made again where the trainer has written its dump anew since. One that an epoch trains on is never
        replaced while the run goes on: see docs/decisions/0003. Raises InputError for any other table.
        """
        options, inputs = self.options, self.inputs
        from_dump = inputs.epoch is not None and options.queries is None and options.vectors is None
        tables = {}
        for source in self.sources:
            table = find_reusable(
                inputs.table(source),
                Request("negatives", inputs.parents(source), self.parameters()),
                "Give the same options, another place with --out, or --overwrite to replace it.",
                overwrite=options.overwrite,
                is_stale=lambda old: (
                    from_dump and old.get("epoch") == inputs.epoch and old.get("by", inputs.by) == inputs.by
                ),
                check_replaceable=functools.partial(require_unused, run) if options.overwrite else None,
            )
            if table is not None:
                tables[source.name] = table
        return tables

    def describe(self) -> Iterator[str]:
        """Say what is going to be done, and what it takes, one line each."""
        inputs, rows = self.inputs, sum(source.queries.rows for source in self.sources)
        width = f"K={self.width}" + (f" from each of {self.options.ranges} label ranges" * (self.options.ranges > 1))
        yield (
            f"{inputs.name}: {rows:,} rows against {inputs.labels:,} vectors by {inputs.by} in {len(self.bounds)} "
            f"block(s) of up to {self.block_rows:,}, index {self.factory.spec}, {width}, "
            f"{self.batch:,} queries at a time"
        )
        scratch = 0 if self.sole else rows * len(self.bounds) * (8 * self.fetch + 4)
        yield (
            f"{inputs.name}: at most {self.estimate} of {say_bytes(self.options.memory)} a worker process; "
            f"{say_bytes(scratch)} of candidates in {staging(inputs.root)} until the merge"
        )


def make_plan(inputs: MineInputs, options: MineOptions, previous: dict[str, Table]) -> MinePlan:
    """Plan a run: the user's options win over those that the trainer requests in the dump; sizes decide the rest.

    Raises InputError: no width anywhere, options that contradict each other, more labels than a candidate can name, or
    a plan that does not fit into `memory`.
    """
    width = options.width or inputs.requested.get("table_width")
    if not width:
        raise InputError(
            f"{inputs.vectors.url}: neither the tables nor the options say how many negatives a query gets. "
            "Give --width K."
        )
    width = int(width)
    if inputs.labels > MOST_LABELS:
        raise InputError(f"{inputs.vectors.url}: {inputs.labels} labels; mining goes up to {MOST_LABELS}.")
    if options.ranges > inputs.labels:
        raise InputError(f"--ranges {options.ranges}: there are only {inputs.labels} labels.")
    if options.window is not None and options.window < options.skip_top + width:
        raise InputError(
            f"--window {options.window}: ranks [{options.skip_top}, {options.window}) are fewer than K={width}, so no "
            f"row could keep K. Give --window {options.skip_top + width} or more, or a smaller --width."
        )
    fixed = SearchParams(options.nprobe, options.ef_search, options.refine)
    fetch = fetched(options, width)
    queries = [source.queries for source in inputs.sources]
    sizes = sizes_of(
        inputs.dimension,
        inputs.vectors.manifest,
        [table.manifest for table in queries],
        options,
        fetch,
        width * options.ranges,
    )
    # Every source counts, made already or not: a table is the same after an attempt that was cut off.
    rows = sum(table.rows for table in queries)
    blocks = settle(options.index or inputs.requested.get("index") or AUTO, inputs.labels, rows, options, sizes)
    index.require_sense(blocks.factory, fixed)
    if not blocks.factory.exact:
        index.empty(blocks.factory, blocks.factory.dimension(inputs.dimension))  # refused here rather than on a worker
    return MinePlan(
        **vars(blocks),
        inputs=inputs,
        sources=inputs.sources,
        width=width,
        fetch=fetch,
        params=fixed,
        previous=previous,
        options=options,
    )
