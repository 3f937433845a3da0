"""`extremis cluster`: put the queries of a dump in the order of balanced clusters (NGAME, appendix C).

    count the rows of each part ─▶ deal rows by part ─▶ cluster each part ─▶ group by shard ─▶ write ─▶ publish

Balanced hierarchical k-means: halve the points repeatedly until clusters of equal size remain. All parts of one level
are halved together, in a few passes over the points. There are log2(N / C) levels, so the cost is O(N D log(N / C)).
The results do not depend on the number of threads.

If the points do not fit into memory, the points are first divided into parts by a tree that is built on a sample. A
point's part depends only on the point itself, so workers can process the shards in any order. The parts have equal
sizes in the sample, and approximately equal sizes in the full data. The cluster sizes within a part still differ by at
most one, because any number of points n >= C (C - 1) is a sum of terms C and C - 1.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.dumps import require_unused, watch_dumps
from pipelines.flow import Collection, FileExchange, Flow, Packet, gather, receive, split_by, to_record_batch
from pipelines.job import Job, Summary, describe, make_table
from pipelines.memory import keep_memory, with_memory
from pipelines.mining.inputs import EmbeddedSource, open_source, require_finite
from pipelines.options import ClusterOptions
from pipelines.progress import Meter, Progress, say_use, silent
from pipelines.runners.local import for_workers, is_local
from schemas.errors import InputError, TableError, option
from schemas.layout import CLUSTERS, MANIFEST, DataLayout, RunLayout, list_numbers
from schemas.manifest import Manifest, is_published
from schemas.owners import require_output_folder
from schemas.randomness import Purpose, generator
from schemas.shard_files import parquet
from schemas.shard_files.parquet import matrix_column
from schemas.sizes import say_bytes
from schemas.storage import join
from schemas.table import Request, Table, find_by_parents, find_reusable, rechunk

SOURCE = "queries"  # a run clusters one split only
ROW, VECTOR = "row", "vector"  # columns of rows on their way
PARTS, TABLE = "parts", "queries"  # names in a Summary
COUNT, DEAL, CLUSTER, WRITE = "count parts", "deal", "cluster", "write"  # steps
_ROUNDS = 8  # rounds of 2-means per level; most parts converge in fewer rounds
_PROCESS = 280 << 20  # bytes of a process with Python, Beam and Arrow at work
_SPARE = 1.25  # because parts are not quite equal
_SAMPLE_ROWS, _SAMPLE_GROUPS = 1 << 16, 64


def balanced_order(vectors: np.ndarray, size: int, smallest: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return point indices ordered by cluster, int64 [N], and the boundaries [K + 1] of K = ceil(N / size) clusters.

    Clusters of `vectors` [N, D] have floor(N / K) or ceil(N / K) points, the larger ones first. They are in the order
    of the tree's leaves, so neighbouring clusters are close in space. Within each cluster, points are ordered as if the
    tree divided the cluster further, down to `smallest` points. If a cluster of n points is divided into m equal parts,
    part i is the range [i n // m, (i + 1) n // m). Both sizes are 1 or more.
    """
    count = len(vectors)
    vectors = np.ascontiguousarray(vectors, np.float32)
    order = np.arange(count)  # points, ordered by part
    # The start of each part, and the number of clusters that the part is divided into.
    starts, clusters = np.array([0, count]), np.array([-(-count // size)])
    while clusters.max(initial=0) > 1:
        left = (clusters + 1) // 2
        base, larger = np.divmod(np.diff(starts), clusters)  # sizes of a part's leaves differ by at most one
        sizes = base * left + np.minimum(larger, left)
        order = order[halve(vectors[order], starts, sizes, clusters > 1, seed)[0]]
        middle = starts[:-1] + sizes
        halves = np.stack([middle, starts[1:]], axis=1).reshape(-1)
        counts = np.stack([left, clusters - left], axis=1).reshape(-1)
        kept = counts > 0  # a part that is already one cluster has no right half
        starts, clusters = np.concatenate([[0], halves[kept]]), counts[kept]
    parts, edges = 2, starts
    while parts * smallest <= size and count:
        points = np.diff(starts)[:, None]
        inner = starts[:-1, None] + np.arange(parts) * points // parts
        finer = np.append(inner.reshape(-1), count)
        sizes = np.diff(finer)[0::2]
        order = order[halve(vectors[order], edges, sizes, np.diff(edges) > 1, seed)[0]]
        parts, edges = 2 * parts, finer
    return order, starts


def halve(
    vectors: np.ndarray, starts: np.ndarray, left: np.ndarray, divided: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Apply balanced 2-means in every part; return the order [N] with each part's left half before its right half.

    `vectors` [N, D] are ordered by part. A point x is assigned to a half by its rank along the line through both
    centroids, c1 and c2. For halves of given sizes this assignment is optimal: the sum of squared distances to the
    centroids is smallest if the points with the largest x.(c1 - c2) are assigned to c1. Also returns the lines [P, D].
    """
    sizes = np.diff(starts)
    part = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(part)) - starts[:-1][part]
    goes_left = within < left[part]
    # The first line of a part is the difference of two points that are drawn from the part.
    draw = generator(seed, Purpose.CLUSTER_LINES, len(sizes))
    two = starts[:-1, None] + (draw.random((len(sizes), 2)) * sizes[:, None]).astype(np.int64)
    two = np.minimum(two, max(0, len(part) - 1))  # for a part without points
    lines = vectors[two[:, 0]] - vectors[two[:, 1]]
    order, scores = np.arange(len(part)), np.empty(len(part), np.float32)
    for last in range(_ROUNDS - 1, -1, -1):
        for number, (low, high) in enumerate(itertools.pairwise(starts.tolist())):
            np.einsum("nd,d->n", vectors[low:high], lines[number], out=scores[low:high])
        # Ties keep their order, and so do all points of a part that is not divided.
        scores[~divided[part]] = 0
        new = np.lexsort((-scores, part))
        moved = np.zeros(len(part), bool)
        moved[new[goes_left]] = True
        before = np.zeros(len(part), bool)
        before[order[goes_left]] = True
        order = new
        if not last or np.array_equal(moved, before):
            break
        lines = _centroid_differences(vectors, order, starts, left)
    return order, lines


def _centroid_differences(vectors: np.ndarray, order: np.ndarray, starts: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Return the difference c1 - c2 of the centroids of each part's halves in `order`, float32 [P, D]."""
    edges = np.append(np.stack([starts[:-1], starts[:-1] + left], axis=1).reshape(-1), starts[-1])
    means = np.zeros((len(edges) - 1, vectors.shape[1]))
    for half, (low, high) in enumerate(itertools.pairwise(edges.tolist())):
        if high > low:  # `np.add.reduceat` over all halves takes ten times as long
            np.add.reduce(vectors[order[low:high]], axis=0, dtype=np.float64, out=means[half])
            means[half] /= high - low
    return (means[0::2] - means[1::2]).astype(np.float32)


@dataclass(frozen=True)
class PartTree:
    """A binary tree of `depth` levels with 2**depth parts.

    `lines` [2**depth - 1, D] float32 and `thresholds` [2**depth - 1] float32 describe the nodes level by level. A point
    goes left if its dot product with the node's line is above the threshold.
    """

    lines: np.ndarray
    thresholds: np.ndarray

    @property
    def parts(self) -> int:
        return len(self.thresholds) + 1


def grow_tree(sample: np.ndarray, parts: int, seed: int) -> PartTree:
    """Grow a tree that divides `sample` [S, D] into `parts` parts (a power of two), whose sizes differ by at most one.

    Each node is split by balanced 2-means. Raises ValueError if `parts` is not a power of two.
    """
    if parts < 1 or parts & (parts - 1):
        raise ValueError(f"{parts} parts; expected a power of two")
    vectors = np.ascontiguousarray(sample, np.float32)
    lines = [np.empty((0, vectors.shape[1]), np.float32)]
    thresholds = [np.empty(0, np.float32)]
    starts = np.array([0, len(vectors)])
    while len(starts) <= parts:
        sizes = np.diff(starts)
        left = (sizes + 1) // 2
        order, across = halve(vectors, starts, left, sizes > 1, seed)
        vectors = vectors[order]
        scores = _project(vectors, across, np.repeat(np.arange(len(sizes)), sizes))
        middle = starts[:-1] + left
        last, first = (np.clip(place, 0, max(0, len(scores) - 1)) for place in (middle - 1, middle))
        between = (scores[last] + scores[first]) / 2 if len(scores) else np.zeros(len(sizes))
        lines.append(across)
        thresholds.append(between.astype(np.float32))
        starts = np.append(np.stack([starts[:-1], middle], axis=1).reshape(-1), len(vectors))
    return PartTree(np.concatenate(lines), np.concatenate(thresholds))


def assign_parts(tree: PartTree, vectors: np.ndarray, first: int) -> np.ndarray:
    """Return the part of each of `vectors` [n, D], the points [first, first + n), as int64 [n] in [0, parts).

    If a point lies exactly on a boundary, a bit of its number selects the side, so that equal points are spread over
    the parts.
    """
    vectors = np.ascontiguousarray(vectors, np.float32)
    node = np.zeros(len(vectors), np.int64)
    number = np.arange(first, first + len(vectors))
    level = 0
    while (1 << level) < tree.parts:
        above = _project(vectors, tree.lines, node) - tree.thresholds[node]
        right = (above < 0) | ((above == 0) & ((number >> level) & 1 == 1))
        node = 2 * node + 1 + right
        level += 1
    return node - (tree.parts - 1)


def _project(vectors: np.ndarray, lines: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Return the dot product x . lines[part of x] for every point, float32 [N]."""
    scores, at_once = np.empty(len(vectors), np.float32), 1 << 15
    for start in range(0, len(vectors), at_once):
        rows = slice(start, start + at_once)
        scores[rows] = np.einsum("nd,nd->n", vectors[rows], lines[part[rows]])
    return scores


@dataclass(frozen=True)
class ClusterInputs:
    """`source`: the rows to be reordered and their embeddings. `origin`: the digest of DATA's table of these rows.

    `epoch`: the epoch of the dump, or None. `out`: the URL of the table.
    """

    source: EmbeddedSource
    origin: str
    epoch: int | None
    use_from: int | None
    out: str

    @property
    def name(self) -> str:
        """Name of the dump in messages."""
        return f"epoch {self.epoch}" if self.epoch is not None else "embeddings"

    @property
    def parents(self) -> dict[str, str]:
        """Digests of the parent tables; `order` is an earlier table in cluster order, if the rows come from it."""
        rows, embeddings = self.source.queries.digest, self.source.embeddings.digest
        return {SOURCE: self.origin, "embeddings": embeddings, **({} if rows == self.origin else {"order": rows})}


def open_clustering(data: str, run: str, epoch: int | None, options: ClusterOptions) -> ClusterInputs:
    """Open the dump of `epoch` (the newest by default), or the embeddings in `options`, and the table of the queries.

    Raises InputError if there is no dump or no location for the new table; TableError if the embeddings are unfinished,
    damaged, computed from other data, or not aligned with the queries.
    """
    layout, queries, out = RunLayout(run), options.queries, options.out
    if queries is not None and epoch is not None:
        raise InputError(
            f"{option('epoch', epoch)} chooses a dump, but {option('queries')} replaces it. Leave one of the two out."
        )
    if queries is None:
        if epoch is None:
            epochs = [one for one in list_numbers(layout.dumps) if is_published(layout.embeddings(one, SOURCE))]
            if not epochs:
                raise InputError(
                    f"{layout.dumps}: no query embeddings to cluster. A run with order.cluster > 1 writes the first "
                    "embeddings two epochs before refresh.start. Check the path of the run, or make embeddings with "
                    f"`extremis embed DATA RUN URL --split train`, and give {option('queries', 'URL')}."
                )
            epoch = epochs[-1]
        queries = layout.embeddings(epoch, SOURCE)
    embeddings = Table.open(queries, "embeddings")
    rows, origin = _rows_of(data, layout, embeddings)
    use_from = options.for_epoch
    if use_from is None and epoch is not None:
        use_from = int(embeddings.parameters.get("use_from", epoch + 2))
    if out is None and use_from is None:
        places = f"{option('for_epoch', 'E')} or {option('out', 'URL')}"
        raise InputError(f"{option('queries')} needs a location for the table: give {places}.")
    out = out or layout.clusters(use_from or 0, SOURCE)
    return ClusterInputs(open_source(SOURCE, rows, embeddings), origin, epoch, use_from, out)


def dumps_for_clusters(run: str) -> dict[int, str]:
    """Map the epoch of every dump of `run` that requests clusters to the digest of its embeddings, oldest first."""
    layout = RunLayout(run)
    digests: dict[int, str] = {}
    for epoch in list_numbers(layout.dumps):
        embeddings = Table.find(layout.embeddings(epoch, SOURCE), "embeddings")
        if embeddings is not None and CLUSTERS in embeddings.parameters:
            digests[epoch] = embeddings.digest
    return digests


def _rows_of(data: str, layout: RunLayout, embeddings: Table) -> tuple[Table, str]:
    """Return the table of the embedded rows (DATA's, or the run's in cluster order) and the digest of DATA's table.

    Raises TableError if the embeddings belong to neither table.
    """
    rows = Table.open(DataLayout(data).queries(str(embeddings.parameters.get("split", "train"))), "queries")
    embedded = embeddings.parents.get("queries")
    if embedded == rows.digest:
        return rows, rows.digest
    for number in reversed(list_numbers(layout.clusters_root)):
        clustered = Table.find(layout.clusters(number, SOURCE), "queries")
        if clustered and clustered.digest == embedded and clustered.parents.get("queries") == rows.digest:
            return clustered, rows.digest
    raise TableError(
        f"{embeddings.url}: these embeddings belong to queries with digest {str(embedded)[:12]}…, but {rows.url} has "
        f"digest {rows.digest[:12]}…, and no table under {layout.clusters_root} matches. Give the data and the run "
        "that the embeddings were computed from."
    )


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
                f"{option('size', size)}: a part of {count:,} queries is too small for clusters of {rows} and "
                f"{rows - 1}. Give a smaller {option('size')}, or more {option('memory')} or {option('part_rows')}."
            )
    full = [clusters - lacking for clusters, lacking in zip(counts, short, strict=True)]
    group = max(16, round(row_group_rows / rows)) * rows
    return ClusterLayout(rows, tuple(full), tuple(short), group, -(-shard_rows // group) * group, seed)


def _expand_ranges(starts: np.ndarray, length: int) -> np.ndarray:
    """Return the concatenated ranges [start, start + length) for all starts."""
    return (starts[:, None] + np.arange(length)).reshape(-1)


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


@dataclass(frozen=True)
class LayoutPlan:
    """The plan once the rows of each part are counted."""

    plan: ClusterPlan
    layout: ClusterLayout
    schema: pa.Schema


def make_plan(inputs: ClusterInputs, options: ClusterOptions) -> ClusterPlan:
    """Plan a clustering run. Raises InputError if the size is missing or invalid or memory is too small; TableError."""
    source, requested = inputs.source, inputs.source.embeddings.parameters.get(CLUSTERS, {})
    size = options.size or requested.get("size")
    if size is None:
        raise InputError(f"{source.embeddings.url}: this run's recipe has no cluster size. Give {option('size', 'C')}.")
    smallest = options.smallest or (None if options.size else requested.get("smallest"))
    if smallest is None:
        smallest = size
        while smallest % 2 == 0 and smallest >= 16:
            smallest //= 2
    if smallest > size or size % smallest or (size // smallest) & (size // smallest - 1):
        raise InputError(
            f"{option('smallest', smallest)}: clusters of {size} are halved repeatedly, so expected {size} divided by "
            "a power of two."
        )
    dimension = source.embeddings.dimension
    part_rows = options.part_rows or _fit_part_rows(source.queries, dimension, options.memory)
    if not (rows := source.queries.rows):
        raise InputError(f"{source.queries.url}: this table has no queries to cluster.")
    parts = 1
    while parts * part_rows < rows:
        parts *= 2
    sample = np.empty((0, dimension), np.float32)
    if parts > 1:
        sample = source.sample_queries(_SAMPLE_ROWS, options.seed, dimension, _SAMPLE_GROUPS)
    return ClusterPlan(inputs, size, smallest, options.seed, grow_tree(sample, parts, options.seed))


def worker_bytes(queries: int, dimension: int, stored: float, memory: int) -> int:
    """Estimate the memory of a worker for `queries` queries of `stored` bytes each, in parts that fit into `memory`."""
    return min(memory, _PROCESS + int(_SPARE * _bytes_per_query(dimension, stored) * queries))


def _bytes_per_query(dimension: int, stored: float) -> float:
    """Estimate the memory per query: the vector as read, as reordered and in float64 for means, and the row itself."""
    return 20 * dimension + 8 * stored + 64


def _fit_part_rows(queries: Table, dimension: int, memory: int) -> int:
    """Return the largest number of queries in a part that fits into `memory`."""
    each = _bytes_per_query(dimension, sum(entry.bytes for entry in queries.shards) / max(1, queries.rows))
    rows = int((memory - _PROCESS) / each / _SPARE)
    if rows < 1 << 10:
        given, enough = (say_bytes(size).replace(" ", "") for size in (memory, _PROCESS + int(each * (1 << 20))))
        raise InputError(
            f"{option('memory', given)}: a worker needs {say_bytes(_PROCESS)} plus {each:,.0f} bytes per query. Give "
            f"{option('memory', enough)}."
        )
    return rows


def cluster(
    data: str,
    run: str,
    epoch: int | None = None,
    options: ClusterOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> Manifest:
    """Publish the queries of one dump (the newest by default) in cluster order. Returns the manifest of the new table.

    If a table was already built from the same input with the same options, it is returned. `beam_options` are passed to
    Beam; `progress` receives one line per step. Raises InputError (no dump, invalid options, a table built with other
    options, a table in use), TableError (a dump that is unfinished, damaged, or from other data), StorageError.
    """
    say, place = progress or silent, functools.partial(for_workers, beam_options)
    data, run, options = place(data), place(run), (options or ClusterOptions()).for_workers(place)
    inputs = open_clustering(data, run, epoch, options)
    if options.out is not None:
        require_output_folder(options.out, "clustered", [data, run])
    planned = with_memory(options, run, is_local(beam_options), say)
    plan = make_plan(inputs, planned)

    def make(job: Job) -> Manifest:
        if options.out is None:  # OUT is one table, which is not resumed
            keep_memory(options, planned.memory, run)
        own = replace(plan, inputs=replace(inputs, out=job.build.url), meter=job.watch.meter)
        manifest = job.build.publish(_make(own, job, say))
        say(f"{inputs.name}: clustered{say_use(inputs.use_from)}")
        return manifest

    def find() -> Manifest | None:
        finished = find_reusable(
            inputs.out,
            Request(TABLE, inputs.parents, plan.parameters()[CLUSTERS], section=CLUSTERS),
            f"Give the same options, another {option('out')}, or {option('overwrite', True)} to replace the table.",
            overwrite=options.overwrite,
            # The trainer has rewritten the dump since then.
            is_stale=lambda old: inputs.epoch is not None and old["epoch"] == inputs.epoch and not options.queries,
            check_replaceable=functools.partial(require_unused, run),
        )
        if finished is not None:
            say(f"{inputs.name}: already clustered{say_use(inputs.use_from)}")
        return finished

    reads = [join(inputs.source.queries.url, MANIFEST)]
    queries, dimension = inputs.source.queries, inputs.source.embeddings.dimension
    stored = sum(entry.bytes for entry in queries.shards) / queries.rows
    need = worker_bytes(queries.rows, dimension, stored, planned.memory)
    return make_table(inputs.out, "clustered", find, make, beam_options, say, needs={}, reads=reads, worker_bytes=need)


def watch(
    data: str,
    run: str,
    options: ClusterOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> int:
    """Cluster every dump that requests clusters and has no table, until the run is finished, like `mine.watch`."""
    say, options = progress or silent, options or ClusterOptions()

    def make(epoch: int) -> dict[str, Manifest]:
        inputs = open_clustering(data, run, epoch, options)
        if find_by_parents(inputs.out, "queries", inputs.parents):
            return {}
        return {"queries": cluster(data, run, epoch, options, beam_options, say)}

    return watch_dumps(run, "clustered", lambda: dumps_for_clusters(run), make, say)


def _make(plan: ClusterPlan, job: Job, say: Progress) -> Manifest:
    queries, parts, counts = plan.queries, "", [plan.queries.rows]
    if plan.tree.parts > 1:
        summary = job.run_step(COUNT, queries.rows, range(len(queries.shards)), count_parts, plan)
        parts, counts = f" in {plan.tree.parts} parts", [summary.count(PARTS, str(n)) for n in range(plan.tree.parts)]
    shard_rows = max(1, queries.rows // len(queries.shards))
    layout = make_layout(counts, plan.size, queries.manifest.row_group_rows or 1, shard_rows, plan.seed)
    layout_plan = LayoutPlan(plan, layout, queries.schema)
    say(
        f"{plan.inputs.name}: {queries.rows:,} queries{parts}, to be grouped into {layout.clusters:,} clusters of "
        f"{layout.rows}"
    )
    exchange = FileExchange(job.watch.staging)

    def wire(flow: Flow) -> Collection:
        shards = flow.create("Shards", range(len(queries.shards)))
        dealt = shards.flat_map("Deal rows", deal_shard, layout_plan, exchange).group("By part")
        clustered = dealt.flat_map("Cluster", cluster_part, layout_plan, exchange).group("By shard")
        return clustered.map("Write shards", write_shard, layout_plan)

    summary, rows = job.run("cluster", dict.fromkeys((DEAL, CLUSTER, WRITE), queries.rows), wire), queries.rows
    parameters = plan.parameters()
    parameters[CLUSTERS] |= {"rows": layout.rows, "count": layout.clusters}
    request = Request(TABLE, plan.inputs.parents, parameters)
    counters = {"rows": rows, "clusters": layout.clusters, "short_clusters": sum(layout.short)}
    return describe(request, summary, layout_plan.schema, layout.row_group_rows, (0, rows), counters=counters)


def count_parts(shard: int, plan: ClusterPlan) -> Summary:
    """Count the rows of source shard `shard` per part."""
    counts = np.zeros(plan.tree.parts, np.int64)
    plan.meter.start(COUNT)
    for _, part in _read_parts(plan, shard, [plan.queries.id_column]):
        plan.meter.count(COUNT, len(part))
        counts += np.bincount(part, minlength=len(counts))
    return Summary(counters={PARTS: Counter({str(part): int(count) for part, count in enumerate(counts) if count})})


def deal_shard(shard: int, layout_plan: LayoutPlan, exchange: FileExchange) -> Iterator[tuple[int, Packet]]:
    """Send the rows of source shard `shard`, with row numbers and vectors, as (part, packet)."""
    columns = [name for name in layout_plan.schema.names if name != "query_id"] + ["query_id"]
    meter = layout_plan.plan.meter
    meter.start(DEAL)
    for rows, part in _read_parts(layout_plan.plan, shard, columns):
        yield from meter.count_bytes(
            DEAL, exchange.send(split_by(to_record_batch(rows.drop_columns(["query_id"])), part))
        )
        meter.count(DEAL, rows.num_rows)


def cluster_part(
    element: tuple[int, Iterable[Packet]], layout_plan: LayoutPlan, exchange: FileExchange
) -> Iterator[tuple[int, Packet]]:
    """Cluster the rows of (part, packets); send (shard of the new table, packet with the positions in `row`)."""
    part, packets = element
    plan = layout_plan.plan
    plan.meter.start(CLUSTER)
    rows = pa.Table.from_batches(receive(packets)).sort_by(ROW).combine_chunks()  # independent of the order of arrival
    order, _ = balanced_order(matrix_column(rows, VECTOR), plan.size, plan.smallest, plan.seed)
    rows = rows.drop_columns([ROW, VECTOR]).take(pa.array(order))
    shard, place = layout_plan.layout.positions(part)
    sent = exchange.send(split_by(to_record_batch(rows.append_column(ROW, pa.array(place))), shard))
    yield from plan.meter.count_bytes(CLUSTER, sent)
    plan.meter.count(CLUSTER, rows.num_rows)


def write_shard(element: tuple[int, Iterable[Packet]], layout_plan: LayoutPlan) -> Summary:
    """Write (shard, packets) as a shard of the new table; row numbers continue from the earlier shards."""
    shard, packets = element
    layout, schema, meter = layout_plan.layout, layout_plan.schema, layout_plan.plan.meter
    meter.start(WRITE)
    placed = schema.remove(schema.get_field_index("query_id")).append(pa.field(ROW, pa.int64()))
    rows = gather(packets, placed).sort_by(ROW)
    ids = pa.array(np.arange(*layout.first[shard : shard + 2]))
    rows = rows.append_column("query_id", ids).select(schema.names).cast(schema)
    shards = len(layout.first) - 1
    entry = parquet.write_shard(layout_plan.plan.inputs.out, shard, shards, rows, layout.row_group_rows)
    meter.count(WRITE, rows.num_rows, entry.bytes)
    return Summary(shards={TABLE: (entry,)})


def _read_parts(plan: ClusterPlan, shard: int, columns: list[str]) -> Iterator[tuple[pa.Table, np.ndarray]]:
    """Yield batches of rows of source shard `shard`, with their numbers and vectors, and the part of each row."""
    source = plan.inputs.source
    first = sum(entry.rows for entry in source.queries.shards[:shard])
    for rows in rechunk(source.aligned(shard, columns), 1 << 13):
        vectors = matrix_column(rows, VECTOR)
        require_finite(vectors, first, source.embeddings.url)
        numbers = pa.array(np.arange(first, first + rows.num_rows))
        yield rows.append_column(ROW, numbers), assign_parts(plan.tree, vectors, first)
        first += rows.num_rows
