"""What is mined: `open_inputs` opens a dump or embeddings; vectors are read in blocks, queries in batches."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.options import MineOptions
from schemas import storage
from schemas.errors import InputError, TableError, option
from schemas.layout import LABEL_TEXTS, DataLayout, RunLayout, list_numbers, source_of_part, staging
from schemas.manifest import is_published
from schemas.randomness import sample_rows
from schemas.shard_files.parquet import matrix_column
from schemas.storage import join
from schemas.table import Table, rechunk
from search.exclusions import Exclusions
from search.topk import pad_vectors

_MOST = np.float32(1e17)  # bound on the numbers of vectors, so that scores are finite in float32


class QueryBatch(NamedTuple):
    """Rows [first, first + B) of a shard: `ids`, `queries` float32 [B, D], and the labels to exclude for each row.

    `weakest` float32 [B]: the lowest score among each row's positives, if a margin needs it.
    """

    first: int
    ids: pa.Array
    queries: np.ndarray
    exclusions: Exclusions
    weakest: np.ndarray = np.empty(0, np.float32)


@dataclass(frozen=True)
class EmbeddedSource:
    """Points for which negatives are mined: `queries`, or `labels` if label texts are training points."""

    name: str
    queries: Table
    embeddings: Table
    ids_of: str = "labels"  # kind of the ids to search; among "points", a point does not find itself

    def batches(self, shard: int, rows: int, dimension: int) -> Iterator[QueryBatch]:
        """Read shard `shard` in batches of `rows` rows (the last may be shorter), with vectors padded to `dimension`.

        Raises TableError if a table is damaged, a vector is not finite, or the embeddings belong to other rows.
        """
        first = sum(entry.rows for entry in self.queries.shards[:shard])
        within = 0
        columns = [self.queries.id_column, *(("label_ids", "filter_label_ids") if self.ids_of == "labels" else ())]
        for table in rechunk(self.aligned(shard, columns), rows):
            queries = matrix_column(table, "vector")
            require_finite(queries, first + within, self.embeddings.url)
            ids = table.column(self.queries.id_column).combine_chunks()
            yield QueryBatch(within, ids, pad_vectors(queries, dimension), Exclusions.of(table))
            within += table.num_rows

    def sample_queries(self, rows: int, seed: int, dimension: int, groups: int = 8) -> np.ndarray:
        """Read about `rows` embeddings float32 [S, D] from a few row groups; the choice depends only on the seed."""
        picked = sample_rows(len(self.embeddings.groups), groups, seed)
        each = -(-rows // len(picked)) if len(picked) else 0
        parts = [np.empty((0, dimension), np.float32)]
        for first, vectors in self.embeddings.vectors(picked):
            require_finite(vectors[:each], first, self.embeddings.url)
            parts.append(pad_vectors(vectors[:each], dimension))
        return np.concatenate(parts)

    def aligned(self, shard: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read the row groups of shard `shard` with a column `vector` and `columns` of the points (None: all columns).

        Raises TableError if a table is damaged or the embeddings belong to other rows.
        """
        columns = [name for name in self.queries.columns if columns is None or name in columns]
        for point, embedding in self.queries.aligned_with(self.embeddings, shard, columns):
            yield point.append_column("vector", embedding.column("vector"))


def open_source(name: str, queries: Table, embeddings: Table) -> EmbeddedSource:
    """Pair `queries` with `embeddings`. Raises TableError if the embeddings are of other data or not aligned."""
    embeddings.require_aligned(queries, "Compute the embeddings again.")
    return EmbeddedSource(name, queries, embeddings)


def equal_ranges(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """Split [start, stop) into `count` consecutive ranges whose sizes differ by at most one; rank g uses range g."""
    edges = [start + (stop - start) * part // count for part in range(count + 1)]
    return list(itertools.pairwise(edges))


def block_bounds(labels: int, ranges: int, block_rows: int) -> list[list[tuple[int, int]]]:
    """Split each of `ranges` equal label ranges into as few blocks of equal size as `block_rows` allows."""
    return [
        equal_ranges(start, stop, -(-(stop - start) // block_rows)) for start, stop in equal_ranges(0, labels, ranges)
    ]


def read_block(table: Table, start: int, stop: int, dimension: int, drop_bias: bool = False) -> np.ndarray:
    """Read the vectors of labels [start, stop) as float32 [stop - start, dimension], two row groups at a time.

    Columns beyond the table's dimension D are filled with zeros. With `drop_bias`, the table's last column, which is a
    constant bias, is also set to zero. Raises TableError if the table is damaged or a vector is not finite.
    """
    readers = 2  # threads; each has a row group in memory, before the index and the queries are loaded
    block = np.zeros((stop - start, dimension), np.float32)
    begin = int(table.groups.of_rows(np.array(start)))
    end = int(np.searchsorted(table.groups.first, stop, side="left"))

    def fill(groups: Iterable[int]) -> None:
        for first, vectors in table.vectors(groups):
            low, high = max(start, first), min(stop, first + len(vectors))
            rows = block[low - start : high - start, : vectors.shape[1]]
            rows[:] = vectors[low - first : high - first]
            require_finite(rows, low, table.url)
            if drop_bias:
                rows[:, -1] = 0

    with ThreadPoolExecutor(readers) as pool:
        for _ in pool.map(fill, np.array_split(np.arange(begin, end), readers)):
            pass
    return block


def require_finite(vectors: np.ndarray, first_row: int, url: str) -> None:
    """Raise TableError that names `url` and the first row of `vectors` [n, D] whose scores may not be finite."""
    if np.abs(vectors).max(initial=0) < _MOST:  # False for NaN
        return
    row = first_row + int(np.flatnonzero(~(np.abs(vectors).max(axis=1) < _MOST))[0])
    raise TableError(
        f"{url}: the vector of row {row} is not finite, or contains {_MOST:.0e} or more, so that scores may be "
        "infinite or NaN. If training has diverged, lower the learning rate, and resume from an earlier checkpoint; "
        "otherwise scale the vectors to length 1."
    )


@dataclass(frozen=True)
class MineInputs:
    """Points and vectors of one mining run. `epoch`: epoch of the dump, or None. `root`: URL of the folder of tables.

    `drop_bias`: whether the vectors are label embeddings with a constant 1 in the last column, as in the queries. This
    column only adds 1 to every score, so the search ignores it. `requested`: parameters of the dump, in which the
    trainer requests a table width and an index. `attempt`: name of the folder in which all files are written before
    they are published. `texts`: the labels table; None if points are searched. `files`: files that are read where they
    lie, and their states, which must stay.
    """

    by: str
    sources: tuple[EmbeddedSource, ...]
    vectors: Table
    drop_bias: bool
    epoch: int | None
    use_from: int | None
    root: str
    requested: dict[str, Any]
    attempt: str = ""
    texts: Table | None = None
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def labels(self) -> int:
        """Number of labels L, or of points N."""
        return self.vectors.rows

    @property
    def name(self) -> str:
        """Name of the dump in messages."""
        return f"epoch {self.epoch}" if self.epoch is not None else "embeddings"

    @property
    def scratch(self) -> str:
        """Prefix of the temporary files of this attempt."""
        return join(staging(self.root), self.attempt)

    @property
    def candidates_root(self) -> str:
        """Prefix of the candidates of one pass."""
        return join(self.scratch, "candidates")

    def table_url(self, source: EmbeddedSource) -> str:
        return join(self.root, source.name)

    def parents(self, source: EmbeddedSource) -> dict[str, str]:
        """Return the digests of the parents of the table of `source`."""
        tables = {"queries": source.queries, "embeddings": source.embeddings, "vectors": self.vectors}
        return {name: table.digest for name, table in tables.items()}


def open_inputs(data: str, run: str, epoch: int | None, options: MineOptions) -> MineInputs:
    """Open the dump of `epoch` (by default the newest); tables named in `options` replace the tables of the dump.

    Raises InputError if there is no dump or no location for the new tables. Raises TableError if a table is unfinished,
    damaged, computed from other data or with another checkpoint, not aligned with its queries, or does not cover all
    labels.
    """
    layout = RunLayout(run)
    whole = options.queries is not None and options.vectors is not None
    if whole and epoch is not None:
        raise InputError(
            f"{option('epoch', epoch)} chooses a dump, but {option('queries')} and {option('vectors')} replace the "
            "dump. Leave out one of the three options."
        )
    if not whole and epoch is None:
        if not (complete := complete_dumps(run)):
            raise InputError(
                f"{layout.dumps}: no complete dump to mine. The trainer writes the first dump two epochs before its "
                "first epoch with hard negatives. Check the path of the run."
            )
        epoch = max(complete)
    dump = None if epoch is None else open_vectors(layout.vectors(epoch))
    if options.queries is not None:
        embedded = Table.open(options.queries, "embeddings")
        split = str(embedded.parameters.get("split", "train"))
        pairs = {"queries": (Table.open(DataLayout(data).queries(split), "queries"), embedded)}
    else:
        assert epoch is not None
        assert dump is not None
        pairs = {
            name: (_rows_of(DataLayout(data), name), Table.open(layout.embeddings(epoch, name), "embeddings"))
            for name in _source_names(dump)
        }
    aligned = [open_source(name, *pair) for name, pair in pairs.items()]
    vectors, by = _vectors(data, layout, epoch, dump, options)
    sources = tuple(replace(source, ids_of="points" if by == "points" else "labels") for source in aligned)
    for source in sources:
        _require_one_training(source, vectors, dump)
    use_from = options.for_epoch
    if use_from is None and dump is not None and epoch is not None:
        use_from = int(dump.parameters.get("use_from", epoch + 2))
    if options.out is None and use_from is None:
        places = f"{option('for_epoch', 'E')} or {option('out', 'URL')}"
        raise InputError(f"{option('queries')} and {option('vectors')} need a location for the table: give {places}.")
    root = options.out or join(layout.negatives_root, f"epoch-{use_from:04d}")
    drop_bias = by == "labels" and bool(
        vectors.parameters.get("bias", dump is not None and dump.parameters.get("bias"))
    )
    requested = dict((dump or vectors).parameters)
    texts = None if by == "points" else Table.find(DataLayout(data).labels, "labels")
    return MineInputs(by, sources, vectors, drop_bias, epoch, use_from, root, requested, texts=texts)


def complete_dumps(run: str) -> dict[int, str]:
    """Map the epoch of every complete dump of `run` to the digest of its vectors, oldest first.

    A dump is complete when its vectors and all sources that the vectors list are published; the vectors are written
    last. An object store may list new files late, so the next few epochs are also checked by name.
    """
    layout = RunLayout(run)
    digests: dict[int, str] = {}
    epochs = list_numbers(layout.dumps)
    if not storage.is_local(run):
        after = max(epochs, default=-1) + 1
        # A run makes the dump -2, for epoch 0, from the previous run.
        epochs = sorted({*epochs, -2, *range(after, after + 8)})
    for epoch in epochs:
        vectors = Table.find(layout.vectors(epoch), "vectors")
        if vectors and all(is_published(layout.embeddings(epoch, name)) for name in _source_names(vectors)):
            digests[epoch] = vectors.digest
    return digests


def open_vectors(url: str) -> Table:
    """Open the vectors of all labels at `url`. Raises TableError."""
    vectors = Table.open(url)
    if vectors.kind not in ("vectors", "embeddings"):
        raise TableError(f"{url}: expected a table of kind vectors or embeddings, got {vectors.kind}. Fix the path.")
    ids = vectors.manifest.id_range
    if ids != (0, vectors.rows) or not vectors.rows:
        raise TableError(f"{url}: expected the vectors of all ids [0, {vectors.rows}), got {ids}.")
    return vectors


def _rows_of(data: DataLayout, name: str) -> Table:
    """Open the rows of the trainer's source `name`.

    The name is `queries` or `labels`, the name of a part if the trainer uses each part as a source, or the name of a
    split if the trainer mixes splits.
    """
    whole = {"queries": (data.queries("train"), "queries"), LABEL_TEXTS: (data.labels, "labels")}
    for source, place in whole.items():
        table = Table.open(*place)
        if name == source:
            return table
        if part := next((part for part in table.parts if source_of_part(source, part.name) == name), None):
            return table.of_parts([part])
    return Table.open(data.queries(name), "queries")


def _vectors(
    data: str, layout: RunLayout, epoch: int | None, dump: Table | None, options: MineOptions
) -> tuple[Table, str]:
    """Return the vectors to search, and their origin: `classifier`, `labels` or `points`."""
    by = options.by or (dump.parameters.get("by") if dump and options.vectors is None else None) or "classifier"
    if by == "points":
        names = [] if dump is None else _source_names(dump)
        if options.queries is not None or options.vectors is not None or names != ["queries"] or epoch is None:
            raise InputError(
                f"{option('by', 'points')}: points are searched among the points of the same dump, so the dump must "
                f"have the single source `queries`; got {', '.join(names) or 'no dump'}. Leave out "
                f"{option('queries')}, {option('vectors')} or {option('by')}, or train on a single split."
            )
        return open_vectors(layout.embeddings(epoch, "queries")), by
    if options.vectors is not None:
        vectors = open_vectors(options.vectors)
        if vectors.parameters.get("what") != "labels" and options.by == "labels":
            raise TableError(
                f"{options.vectors}: this table contains no label embeddings. Make label embeddings with `extremis "
                f"embed DATA RUN OUT --what labels`, or leave {option('by')} out."
            )
        labels = Table.open(DataLayout(data).labels, "labels")
        parent = vectors.parents.get("labels", labels.digest)
        if vectors.rows != labels.rows or parent != labels.digest:
            raise TableError(
                f"{options.vectors}: these embeddings were computed from {vectors.rows} labels, but {labels.url} has "
                f"{labels.rows} labels, or different labels. Compute the embeddings again from this data."
            )
        return vectors, "labels" if vectors.parameters.get("what") == "labels" else "classifier"
    assert epoch is not None
    assert dump is not None
    if by == "classifier":
        return dump, by
    if "labels" not in _source_names(dump):
        raise InputError(
            f"{layout.dump(epoch)}: {option('by', 'labels')}, but this dump has no label embeddings: the run does not "
            "train on label texts. Make label embeddings with `extremis embed DATA RUN OUT --what labels`, and give "
            f"{option('vectors', 'OUT')}."
        )
    return open_vectors(layout.embeddings(epoch, "labels")), "labels"


def _require_one_training(source: EmbeddedSource, vectors: Table, dump: Table | None) -> None:
    """Raise TableError if embeddings and vectors do not belong to the same embedding space."""
    got, expected = source.embeddings.dimension, vectors.dimension
    if got != expected:
        raise TableError(
            f"{source.embeddings.url}: embeddings of {got} dimensions, but the vectors at {vectors.url} have "
            f"{expected}. The two tables come from different runs: make both tables again from one run."
        )
    tables = source.embeddings, vectors
    first, second = (table.parameters.get("step", dump.parameters.get("step") if dump else None) for table in tables)
    checkpoints = {table.parents["checkpoint"] for table in tables if "checkpoint" in table.parents}
    if len(checkpoints) > 1 or len({first, second} - {None}) > 1:
        raise TableError(
            f"{source.embeddings.url} comes from step {first}, but {vectors.url} comes from step {second} or from "
            "another run, and vectors of two models cannot be compared. Embed both tables with the same checkpoint "
            "(extremis embed --step)."
        )


def _source_names(vectors: Table) -> list[str]:
    return list(vectors.parameters.get("sources", ["queries"]))
