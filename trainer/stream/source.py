"""A source of training rows: a queries-like table, the meaning of its positives, and the negatives joined to it."""

import math
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from schemas import storage, tables
from schemas.errors import InputError, TableError
from schemas.layout import CLUSTERS, LABEL_TEXTS, DataLayout
from schemas.manifest import Manifest, Shard, open_manifest, require_parent
from schemas.shard_files.cache import LocalCache
from schemas.shard_files.parquet import list_array, row_groups_of
from schemas.shard_files.ranges import Access, Pieces, naming_damage
from schemas.shard_files.shards import read_group
from schemas.storage import join
from trainer.inputs import Kind, columns_of, require_inputs
from trainer.schedule import MOST_WEIGHT
from trainer.stream.fetch import Fetcher
from trainer.stream.mixing import Share
from trainer.stream.shard_pool import OpenShards


@dataclass(frozen=True)
class Table:
    """A published table: where it is and what its manifest says."""

    url: str
    manifest: Manifest

    @classmethod
    def open(cls, url: str, kind: str) -> "Table":
        """Raises TableError when it is unfinished, foreign or damaged."""
        return cls(url, open_manifest(url, kind))


@dataclass(frozen=True)
class Source:
    """Rows of `table`; a point's positives are its `label_ids`, or, for a labels table, the label itself.

    `negatives` is aligned with `table`: shard by shard, row group by row group, row by row, so the join is a zip.
    An epoch deals each row `weight` times, rounded up or down (`mixing`). Raises InputError where that cannot be.
    """

    name: str  # 'queries', 'labels', or the split's where several are mixed
    table: Table
    negatives: Table | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.weight <= MOST_WEIGHT and math.isfinite(self.weight)):
            raise InputError(
                f"source {self.name}: a weight of {self.weight:g}; expected one above 0 and up to {MOST_WEIGHT}. "
                "Leave out a source that is not to be dealt."
            )

    @property
    def rows(self) -> int:
        return self.table.manifest.rows

    def with_negatives(self, url: str | None) -> "Source":
        """The same rows joined with the table at `url`. Raises TableError when it was made from other rows."""
        if url is None:
            return replace(self, negatives=None)
        negatives = Table.open(url, "negatives")
        require_parent(url, negatives.manifest, "queries", self.table.manifest.digest, self.table.url)
        same = [shard.rows for shard in negatives.manifest.shards] == [s.rows for s in self.table.manifest.shards]
        if not same or negatives.manifest.row_group_rows != self.table.manifest.row_group_rows:
            raise TableError(f"{url}: its shards or row groups do not line up with {self.table.url}. Mine it again.")
        return replace(self, negatives=negatives)

    def in_clusters(self, url: str) -> "Source":
        """The same rows in the order of the clustered table at `url`. Raises TableError when it has other rows."""
        table = Table.open(url, "queries")
        require_parent(url, table.manifest, "queries", self.table.manifest.digest, self.table.url)
        if CLUSTERS not in table.manifest.parameters or table.manifest.rows != self.rows:
            raise TableError(
                f"{url}: not the rows of {self.table.url} in cluster order. Make it with extremis cluster."
            )
        return replace(self, table=table, negatives=None)


def open_queries(data: DataLayout, split: str) -> Table:
    """The queries of `split`. Raises InputError where DATA has no such split, TableError when it is not finished."""
    prefix = "queries/"
    splits = [name.removeprefix(prefix) for name in open_manifest(data.root, "data").parents if name.startswith(prefix)]
    if split not in splits:
        raise InputError(f"{data.root}: no split {split!r}; this data set has {', '.join(sorted(splits))}.")
    return Table.open(data.queries(split), "queries")


def open_sources(
    data: DataLayout, split: str, label_texts: bool, inputs: Kind = "tokens", mix: Mapping[str, float] | None = None
) -> list[Source]:
    """The training points: `split`, and the label texts where asked; or with `mix` the splits that it weighs, by name.

    Raises InputError where there is no such split, or they lack what `inputs` reads; TableError.
    """
    if mix:
        # Sorted, so that a recipe may name them in any order: it decides the row ids.
        splits = sorted(name for name in mix if name != LABEL_TEXTS)
        sources = [Source(name, open_queries(data, name), weight=mix[name]) for name in splits]
    else:
        sources = [Source("queries", Table.open(data.queries(split), "queries"))]
    if LABEL_TEXTS in mix if mix else label_texts:
        weight = mix[LABEL_TEXTS] if mix else 1.0
        sources.append(Source(LABEL_TEXTS, Table.open(data.labels, "labels"), weight=weight))
    for source in sources:
        require_inputs(source.table.url, source.table.manifest, inputs)
    return sources


_TABLES = (
    2  # that a row group is joined from, fetched each on its own: item 2 g is of the table, 2 g + 1 of its negatives
)


@dataclass(frozen=True)
class Reading:
    """How row groups are read. Nothing here changes what a stream deals, only how fast and how carefully it comes.

    `verify`: checksums of what is read. `threads` fetch ahead from beyond a local disk, at most `ahead_bytes`, and what
    they fetch is kept in the directory `cache` where there is one, up to `cache_bytes`.
    """

    verify: bool = True
    threads: int = 16
    ahead_bytes: int = 256 << 20
    cache: str = ""
    cache_bytes: int = 0


@dataclass(frozen=True)
class _Part:
    """The part of a row group that lies in one table: `rows` rows in row group `group` of its shard `shard`."""

    table: Table
    shard: int
    group: int
    rows: int
    columns: tuple[str, ...]

    @property
    def entry(self) -> Shard:
        return self.table.manifest.shards[self.shard]

    @property
    def place(self) -> str:
        return join(self.table.url, self.entry.path)


class RowGroups:
    """Reads row groups of several sources as if they were one table; safe to use from several threads.

    Row groups are numbered source by source in storage order; row ids likewise. It can be pickled; what is open or
    fetched stays behind.
    """

    _fetcher: Fetcher[Pieces] | None

    def __init__(
        self, sources: list[Source], label_type: pa.DataType, inputs: Kind = "tokens", reading: Reading | None = None
    ) -> None:
        self._made_from = (sources, label_type, inputs, reading)
        self.sources = sources
        self._inputs = columns_of(inputs)
        self._label_type = label_type
        self._reading = reading or Reading()
        self._width = max((_width(source) for source in sources), default=0)
        places: list[tuple[int, int, int]] = []
        starts: list[np.ndarray] = []
        shares: list[Share] = []
        base = 0
        for number, source in enumerate(sources):
            shard, group, first = row_groups_of(source.table.manifest)
            places += [(number, int(s), int(g)) for s, g in zip(shard, group, strict=True)]
            starts.append(first[:-1] + base)
            base += int(first[-1])
            shares.append(Share(len(shard), source.weight))
        self._places = places
        # Empty where every row is dealt once.
        self.mix = () if all(source.weight == 1 for source in sources) else tuple(shares)
        self.first_row = np.concatenate([*starts, [base]]).astype(np.int64)
        self._tables = [table for s in sources for table in (s.table, s.negatives) if table is not None]
        self._remote = {table.url for table in self._tables if not storage.is_local(table.url)}
        self._cache = self._open_cache()
        self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowGroups, self._made_from

    @cached_property
    def group_rows(self) -> np.ndarray:
        """Rows of each row group, [M]."""
        return np.diff(self.first_row)

    @property
    def width(self) -> int:
        """K of the joined negatives; 0 where there are none."""
        return self._width

    def ahead(self, groups: Iterable[int]) -> None:
        """Start to fetch what `read` will need of `groups`, each named once for each time that it will be read.

        Nothing is to be done for tables on a local disk. What exceeds the bound waits until something has been read.
        """
        if not self._remote or not self._reading.threads:
            return
        self._after_fork()
        with self._lock:
            if self._fetcher is None:
                self._fetcher = Fetcher(self._fetch, self._size, self._reading.threads, self._reading.ahead_bytes)
            fetcher = self._fetcher
        fetcher.ahead(
            _TABLES * group + number
            for group in groups
            for number, part in enumerate(self._parts(group))
            if part is not None and part.table.url in self._remote
        )

    def close(self) -> None:
        """End the threads, drop what was fetched and close the files. Reading again opens them again."""
        self._after_fork()
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            self._given_up.set()
            fetcher.close()
            self._given_up.clear()
        self._shards.close()

    def read(self, group: int) -> pa.Table:
        """Row group `group` as columns of the inputs, `label_ids` and, joined, `hard`.

        Raises TableError that names shard and row group, StorageError.
        """
        self._after_fork()
        own, negatives = self._parts(group)
        rows = self._read(own, self._take(_TABLES * group))
        if self.sources[self._places[group][0]].table.manifest.kind == "labels":
            ids = rows.column("label_id").to_numpy()
            positives = list_array(ids, np.arange(len(ids) + 1), self._label_type)
        else:
            positives = _cast(rows.column("label_ids"), pa.list_(self._label_type))
        columns = {**{name: rows.column(name) for name in self._inputs}, "label_ids": positives}
        if self._width:
            joined = None if negatives is None else self._read(negatives, self._take(_TABLES * group + 1))
            columns["hard"] = self._hard(joined, rows.num_rows)
        return pa.table(columns)

    def _open_cache(self) -> LocalCache | None:
        """Raises InputError for a directory or a size that cannot work."""
        if not self._reading.cache or not self._remote:
            return None
        cache = LocalCache(self._reading.cache, self._reading.cache_bytes)
        largest = max(
            -(-entry.bytes * min(entry.rows, table.manifest.row_group_rows or 1) // entry.rows)
            for table in self._tables
            for entry in table.manifest.shards
            if table.url in self._remote and entry.rows
        )
        cache.require(
            largest * (self._reading.threads + 1),
            f"the row groups of {self._reading.threads} fetching threads (storage.fetch_threads) and a reading one",
        )
        return cache

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._fetcher = None
        self._given_up = threading.Event()
        self._shards = OpenShards(Access(self._reading.verify, self._cache, self._given_up))

    def _after_fork(self) -> None:
        """In a forked process no thread goes on with what the other process has begun."""
        if self._process != os.getpid():
            self._begin()

    def _take(self, item: int) -> Pieces | None:
        fetcher = self._fetcher
        return None if fetcher is None else fetcher.take(item)

    def _parts(self, group: int) -> tuple[_Part, _Part | None]:
        """Where row group `group` lies, and where its negatives do."""
        number, shard, within = self._places[group]
        source = self.sources[number]
        own = ("label_id", *self._inputs) if source.table.manifest.kind == "labels" else (*self._inputs, "label_ids")
        rows = int(self.first_row[group + 1] - self.first_row[group])
        negatives = source.negatives
        joined = None if negatives is None else _Part(negatives, shard, within, rows, ("label_ids",))
        return _Part(source.table, shard, within, rows, own), joined

    def _fetch(self, item: int) -> Pieces:
        part = self._part(item)
        shard = self._shards.get(part.table.url, part.entry)
        with naming_damage(f"{part.place}, row group {part.group}"):
            return shard.fetch(part.group, part.columns)

    def _size(self, item: int) -> int:
        """Bytes to fetch, about, and rather too many."""
        part = self._part(item)
        return -(-part.entry.bytes * part.rows // part.entry.rows)

    def _part(self, item: int) -> _Part:
        part = self._parts(item // _TABLES)[item % _TABLES]
        assert part is not None
        return part

    def _read(self, part: _Part, pieces: Pieces | None) -> pa.Table:
        shard = self._shards.get(part.table.url, part.entry)
        try:
            rows = read_group(shard, part.group, part.columns, part.place, pieces)
        except TableError:
            if shard.local:
                raise
            if self._cache:
                self._cache.discard(part.entry.sha256)
            rows = read_group(shard, part.group, part.columns, part.place)  # what was spoilt on its way comes whole now
        if rows.num_rows != part.rows:
            raise TableError(
                f"{part.place}, row group {part.group}: {rows.num_rows} rows, its manifest says {part.rows}. "
                "Make the table again."
            )
        return rows

    def _hard(self, joined: pa.Table | None, rows: int) -> pa.ChunkedArray | pa.Array:
        if joined is None:
            pads = pa.array(np.full(rows * self._width, tables.PAD), self._label_type)
            return pa.FixedSizeListArray.from_arrays(pads, self._width)
        return _cast(joined.column("label_ids"), pa.list_(self._label_type, self._width))


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    return column if column.type == kind else column.cast(kind)


def _width(source: Source) -> int:
    if source.negatives is None:
        return 0
    for column in source.negatives.manifest.columns:
        if column.name == "label_ids":
            return int(column.type.rsplit("[", 1)[1].rstrip("]"))
    raise TableError(f"{source.negatives.url}: a negatives table without label_ids. Mine it again.")
