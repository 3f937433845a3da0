"""Plan of one clustering: every choice, made once in the launching process, so that all workers agree."""

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.clustering.inputs import Inputs
from pipelines.clustering.layout import Layout
from pipelines.clustering.top import TopTree, grow
from pipelines.common.meter import Meter
from pipelines.common.watch import require_unused
from pipelines.options import ClusterOptions
from schemas.errors import InputError
from schemas.layout import CLUSTERS, staging
from schemas.manifest import Manifest
from schemas.reuse import Request, find_reusable
from schemas.sizes import say_bytes
from schemas.storage import join
from schemas.table import Table

ROW, VECTOR = "row", "vector"
_PROCESS = 280 << 20  # Python, Beam and Arrow, loaded and at work
_UNPACKED = 8  # bytes of a row in memory and on its way, to one of its bytes in the shard
_SPARE = 1.25  # parts are not quite equal
_SAMPLE_ROWS, _SAMPLE_GROUPS = 1 << 16, 64
_FEW = 8  # queries: smaller clusters are worth no halving, unless they are asked for


@dataclass(frozen=True)
class Plan:
    """The clustering of one table: its inputs, sizes and parts."""

    inputs: Inputs
    size: int
    smallest: int
    seed: int
    tree: TopTree
    meter: Meter = field(default=Meter(), compare=False)

    @property
    def dimension(self) -> int:
        """D."""
        return self.inputs.source.embeddings.dimension

    @property
    def queries(self) -> Table:
        """Rows to be reordered."""
        return self.inputs.source.queries

    @property
    def summary(self) -> str:
        """URL of what the workers report."""
        return join(staging(self.inputs.out), "summary.json")

    def first_row(self, shard: int) -> int:
        """Return the number of the first row of source shard `shard`."""
        return sum(entry.rows for entry in self.queries.shards[:shard])

    def parameters(self) -> dict[str, Any]:
        """Return the table's parameters, without those that follow from the counts of its parts."""
        embeddings = self.inputs.source.embeddings.parameters
        kept = {name: value for name, value in self.queries.parameters.items() if name != CLUSTERS}
        clusters = {
            "size": self.size,
            "smallest": self.smallest,
            "parts": self.tree.parts,
            "seed": self.seed,
            "epoch": self.inputs.epoch,
        }
        return {**kept, CLUSTERS: clusters, "step": embeddings.get("step")}

    def finished_table(self, options: ClusterOptions, run: str) -> Manifest | None:
        """Return the table if it is made; None where it is to be made. Raises InputError where another is there."""
        epoch = self.inputs.epoch
        return find_reusable(
            self.inputs.out,
            Request("queries", self.inputs.parents, self.parameters()[CLUSTERS], section=CLUSTERS),
            "Give the same options, another place with --out, or --overwrite to replace it.",
            overwrite=options.overwrite,
            # The trainer has written the dump anew since.
            is_stale=lambda old: epoch is not None and old["epoch"] == epoch and options.queries is None,
            check_replaceable=functools.partial(require_unused, run),
        )


@dataclass(frozen=True)
class Settled:
    """A plan whose parts have been counted: the place of every cluster, and the columns of its rows."""

    plan: Plan
    layout: Layout
    schema: pa.Schema


def make_plan(inputs: Inputs, options: ClusterOptions) -> Plan:
    """Plan a clustering. Raises InputError: no size, a wrong size, or a memory that is too small; TableError."""
    size = options.size or inputs.requested.get("size")
    if size is None:
        raise InputError(
            f"{inputs.source.embeddings.url}: no trainer asked for clusters of a size here. Give --size C."
        )
    smallest = options.smallest or (inputs.requested.get("smallest") if options.size is None else None) or _halved(size)
    if smallest > size or size % smallest or (size // smallest) & (size // smallest - 1):
        raise InputError(
            f"--smallest {smallest}: clusters of {size} are halved, so expected {size} divided by a power of two."
        )
    rows, part_rows = inputs.source.queries.rows, options.part_rows or _fit(inputs, options.memory)
    if not rows:
        raise InputError(f"{inputs.source.queries.url}: no queries to cluster.")
    parts = 1
    while parts * part_rows < rows:
        parts *= 2
    dimension = inputs.source.embeddings.dimension
    sample = np.empty((0, dimension), np.float32)
    if parts > 1:
        sample = inputs.source.some_queries(_SAMPLE_ROWS, options.seed, dimension, _SAMPLE_GROUPS)
    return Plan(inputs, size, smallest, options.seed, grow(sample, parts, options.seed))


def worker_bytes(queries: int, dimension: int, stored: float, memory: int) -> int:
    """Estimate what a worker takes of `memory` for `queries` of `stored` bytes each on storage, in parts if need be."""
    return min(memory, _PROCESS + int(_SPARE * _bytes_a_query(dimension, stored) * queries))


def _bytes_a_query(dimension: int, stored: float) -> float:
    """Estimate a query's bytes: its vector as it is read, ordered, and in float64 for means; the row itself."""
    return 20 * dimension + _UNPACKED * stored + 64


def _halved(size: int) -> int:
    while size % 2 == 0 and size // 2 >= _FEW:
        size //= 2
    return size


def _fit(inputs: Inputs, memory: int) -> int:
    """Return the queries of a part that fit into `memory`."""
    queries = inputs.source.queries
    stored = sum(entry.bytes for entry in queries.shards) / max(1, queries.rows)
    each = _bytes_a_query(inputs.source.embeddings.dimension, stored)
    rows = int((memory - _PROCESS) / each / _SPARE)
    if rows < 1 << 10:
        raise InputError(
            f"--memory {say_bytes(memory)}: a worker takes {say_bytes(_PROCESS)} and {each:,.0f} bytes a query. "
            f"Give --memory {say_bytes(_PROCESS + int(each * (1 << 20))).replace(' ', '')}."
        )
    return rows
