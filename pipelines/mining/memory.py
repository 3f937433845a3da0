"""Fit blocks of labels, indexes and a batch of queries into the memory of one worker; estimate bytes in storage.

Memory is estimated before the run. A worker needs memory for one group of blocks, the group's indexes and one batch of
queries, independent of N and L. Bytes in storage are estimated from the same sizes. The constants were measured
(docs/mining.md), and include a small reserve.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pipelines.common.vectors import block_bounds, equal_ranges
from pipelines.mining.candidates import has_margin
from pipelines.options import MineOptions
from schemas.errors import InputError
from schemas.manifest import Manifest
from schemas.sizes import say_bytes
from search.factory import AUTO, EXACT, Factory, choose
from search.index import MOST_REFINE

_PROCESS = 280 << 20  # Python, Beam, Arrow and Faiss, loaded and in use
_MATRIX_PRODUCTS = 64 << 20  # Faiss's buffers: blocks of distances, and of vectors that are being added
_PAIR_BYTES = 96  # bytes per candidate while it is fetched, scored, filtered and sorted
LABELS_A_ROW = 64  # assumed positives and filtered labels per row; the manifest does not state their number
LARGEST_BATCH = 4096
SMALLEST_BATCH = 64
SMALLEST_BLOCK = 4096
# Stored bytes of a score, without the bits of its label: 1.8 to 2.3 in a packed candidate, 2.3 to 2.8 in a table.
_PACKED_SCORE, _TABLE_SCORE = 2.4, 2.5


@dataclass(frozen=True)
class Sizes:
    """Sizes that determine an estimate: `fetch` candidates per row and block, `columns` in a finished row."""

    dimension: int
    fetch: int
    refine: int
    columns: int
    vector_group: int  # bytes of a row group of vectors, as read
    query_group: int  # bytes of a row group of queries and embeddings, as read
    table_group: int  # bytes of a row group of the finished table
    ranges: int = 1  # label ranges with `fetch` candidates each
    weakest: int = 0  # bytes that a margin needs per row and group
    aliases: int = 0  # bytes of labels with equal texts


@dataclass(frozen=True)
class Estimate:
    """Peak memory of one worker process in bytes, by use."""

    process: int
    vectors: int
    index: int
    training: int
    queries: int
    reading: int

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        parts = ", ".join(f"{field.name} {say_bytes(getattr(self, field.name))}" for field in fields(self))
        return f"{say_bytes(self.total)} ({parts})"


@dataclass(frozen=True)
class BlockPlan:
    """Division of [0, L) into blocks that fit into memory: `bounds` are P blocks [start, stop), ordered by label range.

    `groups` are ranges [first, stop) of blocks that are in memory together. `range_of` is the label range of each
    block, `block_rows` the largest number of vectors in a block, `batch` the number of queries per search. `estimate`
    is for the largest group. `by_cost`: the index was chosen by its estimated cost, and a block uses the index only if
    this saves time.
    """

    factory: Factory
    by_cost: bool
    batch: int
    block_rows: int
    bounds: tuple[tuple[int, int], ...]
    range_of: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]
    estimate: Estimate
    sizes: Sizes

    @property
    def has_one_group(self) -> bool:
        """Whether there is only one group, so that no merge is needed."""
        return len(self.groups) == 1

    def candidate_bytes(self, group: int) -> float:
        """Estimate the storage in bytes for one row's candidates from one group."""
        first, stop = self.groups[group]
        labels = self.bounds[stop - 1][1] - self.bounds[first][0]
        kept = len({*self.range_of[first:stop]}) * min(self.sizes.fetch, labels)
        return kept * (math.log2(max(2, labels)) / 8 + _PACKED_SCORE) + self.sizes.weakest

    @property
    def row_bytes(self) -> float:
        """Storage in bytes for one row's candidates from all groups; 0 for a single group."""
        return 0.0 if self.has_one_group else sum(map(self.candidate_bytes, range(len(self.groups))))

    def table_bytes(self, rows: int) -> int:
        """Estimate the size in bytes of the finished tables for `rows` rows."""
        return int(rows * self.sizes.columns * (math.log2(max(2, self.bounds[-1][1])) / 8 + _TABLE_SCORE))

    def index_bytes(self) -> int:
        """Estimate the storage in bytes for all indexes; 0 for exact search."""
        if self.factory.exact:
            return 0
        dimension = self.factory.dimension(self.sizes.dimension)
        return sum(self.factory.stored_bytes(stop - start, dimension) for start, stop in self.bounds)

    def pass_rows(self, rows: int) -> int:
        """Return the most rows per pass for which candidates and stored indexes need no more bytes than all tables.

        If the indexes alone need more than half as many bytes as the tables, the candidates may still use the other
        half. Returns all `rows` if the candidates need no more bytes than the tables, or than an eighth of the vectors,
        because each pass reads the vectors again.
        """
        each, tables = self.row_bytes, self.table_bytes(rows)
        vectors = 2 * self.sizes.dimension * self.bounds[-1][1]
        if rows * each <= max(tables, vectors / 8):
            return rows
        return max(1, int(max(tables - self.index_bytes(), tables / 2) / each))

    def needs(self, rows: int, at_once: int | None = None) -> dict[str, int]:
        """Estimate the storage in bytes, by use, needed to build the tables for `rows` rows; omit uses of 0 bytes.

        The uses are: tables; candidates of a pass over `at_once` rows (None: the largest pass); indexes stored between
        passes.
        """
        at_once = min(rows, self.pass_rows(rows)) if at_once is None else at_once
        needs = {
            "tables": self.table_bytes(rows),
            "candidates": int(at_once * self.row_bytes),
            "indexes": self.index_bytes() if at_once < rows else 0,
        }
        return {what: size for what, size in needs.items() if size}


def estimate(factory: Factory, rows: int, batch: int, sizes: Sizes, blocks: int = 1) -> Estimate:
    """Estimate the peak memory of a worker with `blocks` blocks of `rows` vectors and `batch` queries at a time."""
    dimension = factory.dimension(sizes.dimension)
    trained = 0 if factory.exact else min(rows, factory.training_rows())
    # A block is not copied for training if training uses the whole block.
    sample = trained if trained < rows else 0
    # Faiss copies a sample of these vectors; a product quantizer needs as many residuals again.
    copies = 2 if factory.lossy else 1
    return Estimate(
        process=_PROCESS,
        vectors=4 * dimension * rows * blocks,
        index=int(factory.bytes_per_vector(dimension) * rows) * blocks
        + (0 if factory.exact else factory.fixed_bytes(dimension) * blocks),
        training=4 * dimension * (sample + copies * trained),
        queries=batch_bytes(factory, batch, sizes) + sizes.aliases,
        reading=_MATRIX_PRODUCTS + max(sizes.vector_group, sizes.query_group + sizes.table_group),
    )


def batch_bytes(factory: Factory, batch: int, sizes: Sizes) -> int:
    """Estimate the bytes of one batch: its queries, and their fetched, ranked and merged candidates."""
    fetched = sizes.fetch * (sizes.refine if factory.lossy else 1) + 40
    pairs = max(fetched + 2 * sizes.fetch, 4 * sizes.columns, sizes.ranges * sizes.fetch)
    return batch * (pairs * _PAIR_BYTES + 12 * factory.dimension(sizes.dimension) + 16 * LABELS_A_ROW)


def fit_batch(factory: Factory, memory: int, sizes: Sizes) -> int:
    """Return the number of queries per batch that fit into an eighth of the free `memory`: between 64 and 4,096."""
    query_bytes = batch_bytes(factory, 1, sizes)
    return max(SMALLEST_BATCH, min(LARGEST_BATCH, max(0, memory - _PROCESS) // 8 // query_bytes))


def fit_rows(factory: Factory, most: int, batch: int, memory: int, sizes: Sizes) -> int:
    """Return the largest number of vectors in a block that fits into `memory`, at most `most`; 0 if no block fits."""
    if estimate(factory, most, batch, sizes).total <= memory:
        return most
    return bisect_right(range(1, most), memory, key=lambda rows: estimate(factory, rows, batch, sizes).total)


def require_fit(factory: Factory, rows: int, batch: int, memory: int, sizes: Sizes) -> Estimate:
    """Return the memory estimate for a plan. Raises InputError with the required memory if it exceeds `memory`."""
    need = estimate(factory, rows, batch, sizes)
    if need.total > memory:
        raise InputError(
            f"--memory {say_bytes(memory)}: a worker process with blocks of {rows:,} vectors of {sizes.dimension} "
            f"dimensions, index {factory.spec}, and {batch:,} queries at a time needs {need}. "
            f"Give --memory {say_bytes(_sufficient_memory(factory, rows, batch, sizes)).replace(' ', '')} or more, "
            "smaller --block-rows or --query-batch, a smaller --index, or data with smaller row groups."
        )
    return need


def _sufficient_memory(factory: Factory, rows: int, batch: int, sizes: Sizes) -> float:
    """Return enough memory for the plan, including the larger batches that are chosen if there is more memory."""
    memory = estimate(factory, rows, batch, sizes).total
    while (total := estimate(factory, rows, max(batch, fit_batch(factory, memory, sizes)), sizes).total) > memory:
        memory = total
    return 1.05 * memory


def group_bytes(table: Manifest, row_bytes: float) -> int:
    """Estimate the memory of one row group of `table` while it is decoded: about twice its bytes."""
    return int(2 * row_bytes * min(table.row_group_rows or 1, max((s.rows for s in table.shards), default=0)))


def plan_blocks(spec: str, labels: int, queries: int, options: MineOptions, sizes: Sizes) -> BlockPlan:
    """Choose the index, batch size and blocks to search `labels` vectors for `queries` rows within `options.memory`.

    Raises InputError if the memory is too small or `spec` is not a valid index.
    """
    most = min(options.block_rows or labels, -(-labels // options.ranges))
    largest = max(1, fit_rows(Factory(EXACT), most, SMALLEST_BATCH, options.memory, sizes))

    def price(factory: Factory) -> float | None:
        """Return the cost of an index with blocks as large as the memory allows; None if it does not fit."""
        if (options.nprobe or options.refine) and not factory.lists:
            return math.inf  # these options apply to inverted lists only
        batch = options.query_batch or fit_batch(factory, options.memory, sizes)
        fits = options.block_rows or fit_rows(factory, most, batch, options.memory, sizes)
        if fits < min(most, SMALLEST_BLOCK) and not factory.exact:
            return None
        blocks = -(-labels // max(1, min(fits, most)))
        return factory.cost(-(-labels // blocks), blocks, queries, sizes.fetch, options.nprobe, sizes.dimension)

    factory = choose(spec, largest, price=price, dimension=sizes.dimension)
    batch = options.query_batch or fit_batch(factory, options.memory, sizes)
    rows = options.block_rows and most
    if not rows:
        least = min(most, SMALLEST_BLOCK)
        rows = max(least, fit_rows(factory, most, batch, options.memory, sizes))
    parts = block_bounds(labels, options.ranges, rows)
    bounds = tuple(block for part in parts for block in part)
    range_of = tuple(number for number, part in enumerate(parts) for _ in part)
    longest = max(stop - start for start, stop in bounds)
    require_fit(factory, longest, batch, options.memory, sizes)
    one, two = (estimate(factory, longest, batch, sizes, blocks).total for blocks in (1, 2))
    together = min(len(bounds), 1 + (options.memory - one) // max(1, two - one))  # number of blocks that fit
    groups = tuple(equal_ranges(0, len(bounds), -(-len(bounds) // together)))
    need = estimate(factory, longest, batch, sizes, max(stop - first for first, stop in groups))
    return BlockPlan(factory, spec == AUTO, batch, rows, bounds, range_of, groups, need, sizes)


def sizes_of(
    dimension: int, vectors: Manifest, queries: Sequence[Manifest], options: MineOptions, fetch: int, columns: int
) -> Sizes:
    """Return the sizes for an estimate, from the manifests of the tables."""
    query_bytes = 8.0 + 8 * LABELS_A_ROW + 4 * dimension  # id, labels and embedding
    return Sizes(
        dimension=dimension,
        fetch=fetch,
        refine=options.refine or MOST_REFINE,
        columns=columns,
        vector_group=group_bytes(vectors, 4 * dimension + 8),
        query_group=max(group_bytes(table, query_bytes) for table in queries),
        table_group=max(group_bytes(table, 8 * columns + 8) for table in queries),
        ranges=options.ranges,
        weakest=4 * has_margin(options),
    )
