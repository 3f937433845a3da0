"""Plan of one clustering run and position of every row. The launching process makes one plan for all workers.

The layout is computed by arithmetic alone. Clusters are shuffled, because a row group of neighbouring clusters would
act as one large cluster. Every row group contains whole clusters of one size. Clusters of C rows are stored in row
groups whose size is a multiple of C. A part has fewer than C clusters of C - 1 rows. These clusters are stored in
shards at the end of the table, and each such shard is one row group with fewer than C clusters. The number of clusters
in a row group therefore follows from its number of rows: ceil(rows / C).
"""

import functools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.clustering.balanced import PartTree, grow_tree
from pipelines.clustering.inputs import ClusterInputs
from pipelines.common.dumps import require_unused
from pipelines.common.progress import Meter
from pipelines.options import ClusterOptions
from schemas.errors import InputError
from schemas.layout import CLUSTERS
from schemas.manifest import Manifest
from schemas.randomness import Purpose, generator
from schemas.reuse import Request, find_reusable
from schemas.sizes import say_bytes
from schemas.table import Table

_GROUP_CLUSTERS = 16  # fewest clusters in a row group


@dataclass(frozen=True)
class ClusterLayout:
    """Layout of a table. `rows` is C, the number of rows of a full cluster.

    `full` and `short` [parts] are the numbers of clusters with C rows and with C - 1 rows in each part. Row groups have
    `row_group_rows` rows, and shards of full clusters have `shard_rows` rows. Both numbers are multiples of C.
    """

    rows: int
    full: tuple[int, ...]
    short: tuple[int, ...]
    row_group_rows: int
    shard_rows: int
    seed: int

    @property
    def clusters(self) -> int:
        """Number of all clusters."""
        return sum(self.full) + sum(self.short)

    @cached_property
    def first(self) -> np.ndarray:
        """First row of each shard, followed by N, int64 [shards + 1]; shards with clusters of C rows come first."""
        full, short = sum(self.full) * self.rows, sum(self.short) * (self.rows - 1)
        clusters = max(1, min(self.row_group_rows // max(1, self.rows - 1), self.rows - 1))  # clusters of C - 1
        edges = range(0, full, self.shard_rows), range(full, full + short, max(1, clusters * (self.rows - 1)))
        return np.array([*edges[0], *edges[1], full + short])

    def positions(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (shard, row in the shard), int64 [n], for a part's rows in cluster order; clusters of C rows first."""
        full = self._slots[0][sum(self.full[:part]) : sum(self.full[: part + 1])]
        short = self._slots[1][sum(self.short[:part]) : sum(self.short[: part + 1])]
        short = sum(self.full) * self.rows + short * (self.rows - 1)
        rows = np.concatenate([_expand_ranges(full * self.rows, self.rows), _expand_ranges(short, self.rows - 1)])
        shard = np.searchsorted(self.first, rows, side="right") - 1
        return shard, rows - self.first[shard]

    @cached_property
    def _slots(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the clusters, ordered by part: first the clusters of C rows, then the clusters of C - 1 rows."""
        draw = generator(self.seed, Purpose.SAMPLE)
        return draw.permutation(sum(self.full)), draw.permutation(sum(self.short))


def make_layout(points: list[int], size: int, row_group_rows: int, shard_rows: int, seed: int) -> ClusterLayout:
    """Divide parts of `points` points into clusters of at most `size` points whose sizes differ by at most one overall.

    `row_group_rows` and `shard_rows` are the sizes in the old table; the new table uses about the same sizes. Raises
    InputError if a part has too few points for clusters of C and C - 1 points.
    """
    counts = [-(-count // size) for count in points]
    rows = max((-(-count // clusters) for count, clusters in zip(points, counts, strict=True) if clusters), default=1)
    short = [clusters * rows - count for count, clusters in zip(points, counts, strict=True)]
    for lacking, clusters, count in zip(short, counts, points, strict=True):
        if lacking > clusters:
            raise InputError(
                f"--size {size}: a part of {count:,} queries is too small for clusters of {rows} and {rows - 1}. Give "
                "a smaller --size, or larger parts (--memory, --part-rows)."
            )
    full = [clusters - lacking for clusters, lacking in zip(counts, short, strict=True)]
    group = max(_GROUP_CLUSTERS, round(row_group_rows / rows)) * rows
    return ClusterLayout(rows, tuple(full), tuple(short), group, -(-shard_rows // group) * group, seed)


def _expand_ranges(starts: np.ndarray, length: int) -> np.ndarray:
    """Return the concatenated ranges [start, start + length) for all starts."""
    return (starts[:, None] + np.arange(length)).reshape(-1)


ROW, VECTOR = "row", "vector"
_PROCESS = 280 << 20  # bytes of a process with Python, Beam and Arrow at work
_UNPACKED = 8  # bytes of a row in memory and in transfer, per byte in the shard
_SPARE = 1.25  # because parts are not quite equal
_SAMPLE_ROWS, _SAMPLE_GROUPS = 1 << 16, 64
_SMALLEST_SIZE = 8  # queries; halving ends at this size, unless the options request smaller clusters


@dataclass(frozen=True)
class ClusterPlan:
    """The clustering of one table: its inputs, sizes and parts."""

    inputs: ClusterInputs
    size: int
    smallest: int
    seed: int
    tree: PartTree
    meter: Meter = field(default=Meter(), compare=False)

    @property
    def queries(self) -> Table:
        """Table of the rows to reorder."""
        return self.inputs.source.queries

    def first_row(self, shard: int) -> int:
        """Return the number of the first row of source shard `shard`."""
        return sum(entry.rows for entry in self.queries.shards[:shard])

    def parameters(self) -> dict[str, Any]:
        """Return the table's parameters, except parameters that depend on the number of rows in each part."""
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
        """Return the manifest of the table if it exists, else None. Raises InputError if a different table exists."""
        epoch = self.inputs.epoch
        return find_reusable(
            self.inputs.out,
            Request("queries", self.inputs.parents, self.parameters()[CLUSTERS], section=CLUSTERS),
            "Give the same options, another location with --out, or --overwrite to replace the table.",
            overwrite=options.overwrite,
            # The trainer has rewritten the dump since then.
            is_stale=lambda old: epoch is not None and old["epoch"] == epoch and options.queries is None,
            check_replaceable=functools.partial(require_unused, run),
        )


@dataclass(frozen=True)
class LayoutPlan:
    """A plan with the row counts of all parts: the layout of the clusters, and the schema of the rows."""

    plan: ClusterPlan
    layout: ClusterLayout
    schema: pa.Schema


def make_plan(inputs: ClusterInputs, options: ClusterOptions) -> ClusterPlan:
    """Plan a clustering run. Raises InputError if the size is missing or invalid or memory is too small; TableError."""
    size = options.size or inputs.requested.get("size")
    if size is None:
        raise InputError(f"{inputs.source.embeddings.url}: the recipe of this run has no cluster size. Give --size C.")
    smallest = (
        options.smallest or (inputs.requested.get("smallest") if options.size is None else None) or _smallest_size(size)
    )
    if smallest > size or size % smallest or (size // smallest) & (size // smallest - 1):
        raise InputError(
            f"--smallest {smallest}: clusters of {size} are halved repeatedly, so expected {size} divided by a power "
            "of two."
        )
    rows, part_rows = inputs.source.queries.rows, options.part_rows or _fit_part_rows(inputs, options.memory)
    if not rows:
        raise InputError(f"{inputs.source.queries.url}: this table has no queries to cluster.")
    parts = 1
    while parts * part_rows < rows:
        parts *= 2
    dimension = inputs.source.embeddings.dimension
    sample = np.empty((0, dimension), np.float32)
    if parts > 1:
        sample = inputs.source.sample_queries(_SAMPLE_ROWS, options.seed, dimension, _SAMPLE_GROUPS)
    return ClusterPlan(inputs, size, smallest, options.seed, grow_tree(sample, parts, options.seed))


def worker_bytes(queries: int, dimension: int, stored: float, memory: int) -> int:
    """Estimate the memory of a worker for `queries` queries of `stored` bytes each, in parts that fit into `memory`."""
    return min(memory, _PROCESS + int(_SPARE * _bytes_per_query(dimension, stored) * queries))


def _bytes_per_query(dimension: int, stored: float) -> float:
    """Estimate the memory per query: the vector as read, as reordered and in float64 for means, and the row itself."""
    return 20 * dimension + _UNPACKED * stored + 64


def _smallest_size(size: int) -> int:
    while size % 2 == 0 and size // 2 >= _SMALLEST_SIZE:
        size //= 2
    return size


def _fit_part_rows(inputs: ClusterInputs, memory: int) -> int:
    """Return the largest number of queries in a part that fits into `memory`."""
    queries = inputs.source.queries
    stored = sum(entry.bytes for entry in queries.shards) / max(1, queries.rows)
    each = _bytes_per_query(inputs.source.embeddings.dimension, stored)
    rows = int((memory - _PROCESS) / each / _SPARE)
    if rows < 1 << 10:
        raise InputError(
            f"--memory {say_bytes(memory)}: a worker needs {say_bytes(_PROCESS)} plus {each:,.0f} bytes per query. "
            f"Give --memory {say_bytes(_PROCESS + int(each * (1 << 20))).replace(' ', '')}."
        )
    return rows
