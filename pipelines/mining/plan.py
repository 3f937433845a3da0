"""Every choice of one mining run, made once in the launching process, so that all workers agree."""

from dataclasses import dataclass
from typing import Any

from pipelines.mining import index
from pipelines.mining.blocks import block_bounds, default_block_rows
from pipelines.mining.candidates import MOST_LABELS
from pipelines.mining.dump import Dump, Source
from pipelines.mining.options import AUTO, MineOptions
from schemas.errors import InputError
from schemas.layout import RunLayout, shard_name
from schemas.storage import join


@dataclass(frozen=True)
class Plan:
    """What to search, how, and where to put it. `bounds` are the P blocks [start, stop) of [0, L)."""

    dump: Dump
    sources: tuple[Source, ...]
    run: RunLayout
    width: int
    index: str
    nprobe: int | None
    block_rows: int
    bounds: tuple[tuple[int, int], ...]
    options: MineOptions

    @property
    def scratch(self) -> str:
        return self.run.candidates(self.dump.use_from)

    def table(self, source: Source) -> str:
        """Where the table of `source` is published."""
        return self.run.negatives(self.dump.use_from, source.name)

    def candidates(self, source: Source, block: int) -> str:
        """Where the candidates of one block are kept until the merge."""
        return join(self.scratch, source.name, shard_name(block, len(self.bounds), "block"))

    def summary(self, source: Source) -> str:
        """What the workers report to the launching process."""
        return join(self.scratch, f"{source.name}.json")

    def tasks(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """(block, [(source, shard), ...]): each block against every query shard, in `tasks_per_block` work items."""
        shards = [(s, i) for s, source in enumerate(self.sources) for i in range(len(source.queries.shards))]
        splits = min(self.options.tasks_per_block, len(shards))
        return [(block, shards[split::splits]) for block in range(len(self.bounds)) for split in range(splits)]

    def parameters(self) -> dict[str, Any]:
        """As they stand in the table's manifest."""
        return {
            "width": self.width,
            "index": self.index,
            "nprobe": self.nprobe,
            "block_rows": self.block_rows,
            "blocks": len(self.bounds),
            "seed": self.options.seed,
            "epoch": self.dump.epoch,
            "step": self.dump.vectors.parameters.get("step"),
            "use_from": self.dump.use_from,
            "labels": self.dump.labels,
        }


def make_plan(dump: Dump, sources: tuple[Source, ...], run: str, options: MineOptions) -> Plan:
    """Options that are given win over the trainer's wishes in the dump; the rest follows from the sizes.

    Raises InputError: no width anywhere, or more labels than a candidate can name.
    """
    wishes = dump.vectors.parameters
    width = options.width or wishes.get("table_width")
    if not width:
        raise InputError(f"{dump.vectors_url}: neither the dump nor the options say how many negatives a query gets.")
    if dump.labels > MOST_LABELS:
        raise InputError(f"{dump.vectors_url}: {dump.labels} labels; mining goes up to {MOST_LABELS}.")
    block_rows = min(options.block_rows or default_block_rows(dump.dimension), dump.labels)
    bounds = tuple(block_bounds(dump.labels, block_rows))
    # Every source counts, made already or not: a table is the same whether its try was cut off before or not.
    queries = sum(source.queries.rows for source in dump.sources)
    rows = min(stop - start for start, stop in bounds)
    spec = index.choose(options.index or wishes.get("index") or AUTO, rows, queries, options.nprobe)
    return Plan(dump, sources, RunLayout(run), int(width), spec, options.nprobe, block_rows, bounds, options)
