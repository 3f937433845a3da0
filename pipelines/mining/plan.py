"""The plan of mining: blocks that fit into memory, passes whose candidates fit on the disk, and where each file lies.

`make_plan`, the last function, uses all others: `plan_blocks` chooses blocks and groups by the estimate of memory,
which comes first, and `MinePlan` adds passes and files. Labels [0, L) are divided into label ranges, usually one, with
K negatives each for every row, and ranges into blocks; `pipelines/mine.py` says what a group and a pass are.
"""

import functools
import json
import math
import tempfile
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.dumps import require_unused
from pipelines.mining.filters import find_aliases, has_margin, is_bounded, make_rule
from pipelines.mining.inputs import EmbeddedSource, MineInputs, block_bounds, equal_ranges
from pipelines.options import MineOptions
from pipelines.progress import Meter
from schemas import arrow, code_version, storage
from schemas.errors import InputError, option
from schemas.layout import phases, shard_name, staging
from schemas.manifest import Manifest
from schemas.sizes import say_bytes
from schemas.storage import join, require_room
from schemas.table import Request, Table, find_reusable
from search import index
from search.exclusions import ScoreRule
from search.index import AUTO, EXACT, MOST_REFINE, Factory, SearchParams, choose
from search.topk import MOST_LABELS

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
    """Sizes that determine an estimate: `fetch` candidates per row and block, `columns` negatives in a finished row."""

    dimension: int
    fetch: int
    refine: int  # a lossy index returns `refine` times `fetch` candidates, which are then scored exactly
    columns: int
    vector_group: int  # bytes of a row group of vectors, as read
    query_group: int  # bytes of a row group of queries and embeddings, as read
    table_group: int  # bytes of a row group of the finished table
    ranges: int = 1  # label ranges with `fetch` candidates each
    weakest: int = 0  # bytes that a margin needs per row and group
    aliases: int = 0  # bytes of labels with equal texts


@dataclass(frozen=True)
class Estimate:
    """Peak memory of one worker process in bytes, by use; `reading`: row groups while they are decoded or encoded."""

    process: int
    vectors: int
    index: int
    training: int
    queries: int
    reading: int

    @property
    def total(self) -> int:
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
        """Whether a search gives the final negatives: there are no candidates to store and merge."""
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
        """Return the most rows per pass, so that mining needs about twice the storage of its tables.

        Candidates and stored indexes together may be as large as the tables; the candidates may always be half as
        large. All `rows` are one pass if their candidates are no larger than the tables, or than an eighth of the
        vectors, because each pass reads the vectors again.
        """
        tables = self.table_bytes(rows)
        vectors = 2 * self.sizes.dimension * self.bounds[-1][1]  # as float16
        if rows * self.row_bytes <= max(tables, vectors / 8):
            return rows
        return max(1, int(max(tables - self.index_bytes(), tables / 2) / self.row_bytes))

    def needs(self, rows: int, at_once: int | None = None) -> dict[str, int]:
        """Estimate the storage in bytes, by use, to mine `rows` rows; `at_once`: rows of a pass (None: the largest)."""
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
    copies = 2 if factory.lossy else 1  # Faiss's copy of these vectors, and for a product quantizer their residuals
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


def _require_fit(factory: Factory, rows: int, batch: int, memory: int, sizes: Sizes) -> None:
    """Raise InputError with the required memory if a plan does not fit into `memory`."""
    need = estimate(factory, rows, batch, sizes)
    if need.total <= memory:
        return
    enough = need.total  # also for the larger batches that are chosen if there is more memory
    while (total := estimate(factory, rows, max(batch, fit_batch(factory, enough, sizes)), sizes).total) > enough:
        enough = total
    given, wanted = (say_bytes(size).replace(" ", "") for size in (memory, 1.05 * enough))
    raise InputError(
        f"{option('memory', given)}: a worker process with blocks of {rows:,} vectors of {sizes.dimension} dimensions, "
        f"index {factory.spec}, and {batch:,} queries at a time needs {need}. Give {option('memory', wanted)} or more, "
        f"smaller {option('block_rows')} or {option('query_batch')}, a smaller {option('index')}, or data with smaller "
        "row groups."
    )


def plan_blocks(spec: str, labels: int, queries: int, options: MineOptions, sizes: Sizes) -> BlockPlan:
    """Choose the index, batch size and blocks to search `labels` vectors for `queries` rows within `options.memory`.

    Raises InputError if the memory is too small or `spec` is not a valid index.
    """
    most = min(options.block_rows or labels, -(-labels // options.ranges))
    largest = max(1, fit_rows(Factory(EXACT), most, SMALLEST_BATCH, options.memory, sizes))  # of a block

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
    rows = most
    if not options.block_rows:
        rows = max(min(most, SMALLEST_BLOCK), fit_rows(factory, most, batch, options.memory, sizes))
    by_range = block_bounds(labels, options.ranges, rows)
    bounds = tuple(block for blocks in by_range for block in blocks)
    range_of = tuple(number for number, blocks in enumerate(by_range) for _ in blocks)
    longest = max(stop - start for start, stop in bounds)
    _require_fit(factory, longest, batch, options.memory, sizes)
    one, two = (estimate(factory, longest, batch, sizes, blocks).total for blocks in (1, 2))
    together = min(len(bounds), 1 + (options.memory - one) // max(1, two - one))  # number of blocks that fit
    groups = tuple(equal_ranges(0, len(bounds), -(-len(bounds) // together)))
    need = estimate(factory, longest, batch, sizes, max(stop - first for first, stop in groups))
    return BlockPlan(factory, spec == AUTO, batch, rows, bounds, range_of, groups, need, sizes)


def sizes_of(
    dimension: int, vectors: Manifest, queries: Sequence[Manifest], options: MineOptions, fetch: int, columns: int
) -> Sizes:
    """Return the sizes for an estimate, from the manifests of the tables."""

    def group_bytes(table: Manifest, row_bytes: int) -> int:
        """Estimate the memory of one row group of `table` while it is decoded: about twice its bytes."""
        return 2 * row_bytes * min(table.row_group_rows or 1, max((s.rows for s in table.shards), default=0))

    query_bytes = 8 + 8 * LABELS_A_ROW + 4 * dimension  # id, labels and embedding
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


_CONTENT_OPTIONS = (  # options that determine the content of a table
    *("nprobe", "ef_search", "refine", "target_recall", "seed"),
    *("skip_top", "window", "margin", "relative_margin", "max_score", "min_score", "temperature"),
    "audit_queries",
)
RECORD = "record"  # extension of the files that record finished work
INDEXES = "indexes"  # folder of the indexes that are stored between passes

SourceShard = tuple[int, int]  # numbers of a source and of a shard of its queries
Task = tuple[int, bool, Sequence[SourceShard]]  # group, whether to store its indexes, shards to search


def remedy() -> str:
    """Return what a user does about a full disk."""
    return (
        f"Free some space, remove tables of earlier epochs, mine fewer negatives ({option('width')}) or choose another "
        "location for RUN. The same command continues with the unfinished shards."
    )


@dataclass(frozen=True)
class MinePlan(BlockPlan):
    """Plan of the tables of one dump: what is searched, and where files are.

    `width` is the number K of negatives per label range, `fetch` the number of candidates per row and block. `aliases`
    is the number of labels that share their text with another label. `previous`: tables to compare with, by source.
    """

    inputs: MineInputs
    sources: tuple[EmbeddedSource, ...]
    width: int
    fetch: int
    params: SearchParams
    previous: dict[str, Table]
    options: MineOptions
    aliases: int = 0
    meter: Meter = field(default=Meter(), compare=False)

    @property
    def columns(self) -> int:
        return self.width * self.options.ranges

    @property
    def dimension(self) -> int:
        """Number of columns of vectors and queries in memory, where an index may need padding."""
        return self.factory.dimension(self.inputs.vectors.dimension)

    @property
    def schema(self) -> pa.Schema:
        return arrow.negatives(self.columns, arrow.label_type(self.inputs.labels))

    def without_sources(self, finished: Container[str]) -> "MinePlan":
        """Return the plan without the sources `finished`; the tables of a plan do not depend on each other."""
        return replace(self, sources=tuple(source for source in self.sources if source.name not in finished))

    def audit_size(self, source: EmbeddedSource) -> int:
        """Return how many rows are also searched exactly: by default one in 400, so that the audit is cheap."""
        if self.options.audit_queries is not None:
            return self.options.audit_queries
        return max(200, min(1000, source.queries.rows // 400))

    @property
    def scores_positives(self) -> bool:
        """Whether a flow scores positives in all groups, for a margin, before the search; one group needs no flow."""
        return has_margin(self.options) and not self.has_one_group

    def rule(self, weakest: np.ndarray) -> ScoreRule | None:
        """Return the rule about scores for a search; `weakest` [B]: the lowest score of each row's positives."""
        return make_rule(self.options, weakest, self.width)

    @functools.cached_property
    def work_digest(self) -> str:
        """Digest of everything that determines the content of shards and indexes."""
        parents = [self.inputs.parents(source) for source in self.inputs.sources]
        before = {name: table.digest for name, table in self.previous.items()}
        facts = [code_version(), self.parameters(), self.by_cost, parents, before]
        return storage.sha256(json.dumps(facts, sort_keys=True).encode())[:16]

    @property
    def finished_root(self) -> str:
        """Prefix of this attempt's finished shards and indexes, which a later attempt at the same work takes over."""
        return join(phases(self.inputs.root), f"{self.work_digest}-{self.inputs.attempt}")

    def candidates_url(self, source_shard: SourceShard, group: int) -> str:
        """Return the URL of one group's candidates for one shard; the file exists until the end of the pass."""
        folder = shard_name(group, len(self.groups), "group")
        return join(self.inputs.candidates_root, folder, self._shard_path(source_shard, "keys"))

    @property
    def alias_url(self) -> str:
        """URL of the file of labels with equal texts, if there are any."""
        return join(self.inputs.scratch, "aliases")

    def _shard_path(self, source_shard: SourceShard, extension: str) -> str:
        source = self.sources[source_shard[0]]
        return join(source.name, shard_name(source_shard[1], len(source.queries.shards), extension))

    @property
    def finished_folders(self) -> list[str]:
        """Folders of finished files, below `finished_root`."""
        return [*(join("tables", source.name) for source in self.sources), INDEXES]

    def staged_table_url(self, source: EmbeddedSource) -> str:
        return join(self.finished_root, "tables", source.name)

    def record_path(self, source_shard: SourceShard) -> str:
        """Return the path of a finished shard's record, below `finished_root`."""
        return join("tables", self._shard_path(source_shard, RECORD))

    def index_record_path(self, block: int) -> str:
        """Return the path of the record of a block's stored index, below `finished_root`."""
        return join(INDEXES, shard_name(block, len(self.bounds), RECORD))

    @property
    def source_shards(self) -> list[SourceShard]:
        return [(s, i) for s, source in enumerate(self.sources) for i in range(len(source.queries.shards))]

    def rows(self, source_shards: Iterable[SourceShard]) -> int:
        return sum(self.sources[source].queries.shards[shard].rows for source, shard in source_shards)

    def passes(self, source_shards: Iterable[SourceShard]) -> list[list[SourceShard]]:
        """Divide shards in order into passes of at most `pass_rows` rows, but at least one shard."""
        most, passes, held = self.pass_rows(self.rows(self.source_shards)), list[list[SourceShard]](), 0
        for source_shard in source_shards:
            held += self.rows([source_shard])
            if not passes or held > most:
                passes.append([])
                held = self.rows([source_shard])
            passes[-1].append(source_shard)
        return passes

    def tasks(self, source_shards: Sequence[SourceShard], keep: bool = False) -> list[Task]:
        """List tasks: for each group, `tasks_per_block` tasks, or fewer, which share the shards.

        With `keep`, the first task of a group stores its indexes.
        """
        splits = min(self.options.tasks_per_block, len(source_shards))
        return [
            (group, keep and split == 0, source_shards[split::splits])
            for group in range(len(self.groups))
            for split in range(splits)
        ]

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of a table's manifest: everything that determines its content, except its parents."""
        options, inputs = self.options, self.inputs
        texts = {"rule": options.equal_texts, "labels": inputs.texts.digest} if self.aliases and inputs.texts else None
        return {
            **options.model_dump(include={*_CONTENT_OPTIONS}),
            # None for "top", as in tables from versions without other draws.
            "sample": None if options.sample == "top" else options.sample,
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
            # None if no texts are equal, as in tables from versions that did not compare texts.
            "equal_texts": texts,
        }

    def needs_of(self, source_shards: Sequence[SourceShard], indexed: int = 0) -> dict[str, int]:
        """Estimate the bytes, by use, that mining these shards writes to the tables' storage; see `needs`.

        indexed: number of blocks whose indexes already exist.
        """
        rows = [self.rows(some) for some in self.passes(source_shards)]
        needs = self.needs(sum(rows), max(rows, default=0))
        if "indexes" in needs:
            needs["indexes"] = needs["indexes"] * (len(self.bounds) - indexed) // len(self.bounds)
        return needs

    def require_room(
        self, source_shards: Sequence[SourceShard], indexed: int = 0, here: bool = True, begun: bool = False
    ) -> None:
        """Raise PlanError, or RoomError if the work has `begun`, if there is not enough room: see `needs_of`.

        here: whether workers run on this machine and write files to its TMPDIR before an upload to other storage.
        """
        require_room(self.inputs.root, self.needs_of(source_shards, indexed), remedy(), begun)
        if here and not storage.is_local(self.inputs.root) and source_shards:
            rows = max(self.rows([source_shard]) for source_shard in source_shards)
            largest = max(self.table_bytes(rows), int(rows * self.row_bytes / len(self.groups)))
            elsewhere = "Set TMPDIR to a disk with more room."
            require_room(tempfile.gettempdir(), {"a file for storage": largest}, elsewhere, begun)

    def finished_tables(self, run: str | None) -> dict[str, Manifest]:
        """Return the finished tables of this plan, by source.

        A table is rebuilt if the trainer has rewritten its dump. A table that an epoch trains on is never replaced
        while the run continues: see docs/decisions/0003. Raises InputError if a different table already exists at the
        location.
        """
        options, inputs = self.options, self.inputs
        from_dump = inputs.epoch is not None and options.queries is None and options.vectors is None
        tables = {}
        for source in self.sources:
            table = find_reusable(
                inputs.table_url(source),
                Request("negatives", inputs.parents(source), self.parameters()),
                f"Give the same options, another {option('out')}, or {option('overwrite', True)} to replace it.",
                overwrite=options.overwrite,
                is_stale=lambda old: (
                    from_dump and old.get("epoch") == inputs.epoch and old.get("by", inputs.by) == inputs.by
                ),
                check_replaceable=functools.partial(require_unused, run) if run and options.overwrite else None,
            )
            if table is not None:
                tables[source.name] = table
        return tables

    def describe(self) -> Iterator[str]:
        """Yield lines that describe the plan and its needs, one fact per line."""
        inputs, rows = self.inputs, self.rows(self.source_shards)
        width = f"K={self.width}" + (f" from each of {self.options.ranges} label ranges" * (self.options.ranges > 1))
        yield (
            f"{inputs.name}: search {rows:,} rows against {inputs.labels:,} vectors ({inputs.by}) in "
            f"{len(self.bounds)} block(s) of up to {self.block_rows:,}, index {self.factory.spec}, {width}, "
            f"{self.batch:,} queries at a time"
        )
        together = max(stop - first for first, stop in self.groups)
        yield (
            f"{inputs.name}: a worker process needs at most {self.estimate} of its {say_bytes(self.options.memory)}, "
            f"with {together} block(s) at a time"
        )
        if self.aliases:
            yield (
                f"{inputs.name}: {self.aliases:,} labels share their text with another label; these labels are not "
                f"used as negatives for a row that has a positive with the same text ({option('equal_texts')})"
            )
        needs, passes = self.needs_of(self.source_shards), len(self.passes(self.source_shards))
        scratch = [f"{say_bytes(size)} of {what}" for what, size in needs.items() if what != "tables"]
        yield (
            f"{inputs.name}: {passes} pass(es) over the rows; tables of about {say_bytes(needs.get('tables', 0))}; "
            f"temporary files in {staging(inputs.root)}: {' and '.join(scratch) or 'nothing'}"
        )


def make_plan(inputs: MineInputs, options: MineOptions, previous: dict[str, Table]) -> MinePlan:
    """Plan a run: the user's options override the trainer's request in the dump, and table sizes determine the rest.

    Raises InputError if neither the options nor the dump specify a width, options contradict each other, there are too
    many labels, or the plan does not fit into `memory`.
    """
    width = options.width or inputs.requested.get("table_width")
    if not width:
        raise InputError(f"{inputs.vectors.url}: the number of negatives K is unknown. Give {option('width', 'K')}.")
    width = int(width)
    if inputs.labels > MOST_LABELS:
        raise InputError(f"{inputs.vectors.url}: {inputs.labels} labels; mining supports at most {MOST_LABELS}.")
    if options.ranges > inputs.labels:
        raise InputError(f"{option('ranges', options.ranges)}: expected at most {inputs.labels}, the number of labels.")
    if options.window is not None and options.window < options.skip_top + width:
        raise InputError(
            f"{option('window', options.window)}: the ranks [{options.skip_top}, {options.window}) are fewer than "
            f"K={width}. Give {option('window', options.skip_top + width)} or more, or a smaller {option('width')}."
        )
    fixed = SearchParams(options.nprobe, options.ef_search, options.refine)
    # Usually `width` of these candidates of a row and label range pass the filters.
    fetch = options.window or options.skip_top + width * (2 if is_bounded(options) else 1)
    queries = [source.queries.manifest for source in inputs.sources]
    aliases = find_aliases(inputs.texts, options.equal_texts)
    dimension = inputs.vectors.dimension
    sizes = sizes_of(dimension, inputs.vectors.manifest, queries, options, fetch, width * options.ranges)
    # A worker that reads the file of aliases needs twice the size of its content.
    sizes = replace(sizes, aliases=2 * sum(part.nbytes for part in aliases or ()))
    # Sources with finished tables count too, so that a resumed run makes the same plan and the same tables.
    rows = sum(manifest.rows for manifest in queries)
    blocks = plan_blocks(options.index or inputs.requested.get("index") or AUTO, inputs.labels, rows, options, sizes)
    index.require_applicable(blocks.factory, fixed)
    if not blocks.factory.exact:
        # An invalid factory string fails here rather than on a worker.
        index.create_index(blocks.factory, blocks.factory.dimension(dimension))
    return MinePlan(
        **vars(blocks),
        inputs=inputs,
        sources=inputs.sources,
        width=width,
        fetch=fetch,
        params=fixed,
        previous=previous,
        options=options,
        aliases=len(aliases.labels) if aliases else 0,
    )
