"""Row groups of the training rows, joined with their negatives: `RowGroups` reads one row group of both tables.

Bytes of remote tables are downloaded ahead of the reads, within a memory limit; recently used shards stay open.
"""

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from schemas import PAD, storage
from schemas.errors import TableError
from schemas.manifest import Shard, shard_url
from schemas.ragged import offsets_of
from schemas.shard_files.parquet import list_array
from schemas.shard_files.ranges import Access, FetchedRanges, LocalCache, naming_damage
from schemas.shard_files.shards import OpenShard, open_shard, read_group
from schemas.shares import ALL_ROWS
from schemas.table import Table
from trainer.input_kinds import InputKind
from trainer.inputs import columns_of
from trainer.stream.order import WeightedGroups
from trainer.stream.sources import Source

T = TypeVar("T")
THREAD = "extremis-fetch"
HARD, FILTERED = "hard", "filter_label_ids"  # the columns of joined negatives, and of labels that are no negatives


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading row groups: they change how fast and how carefully rows are read, never which rows.

    `verify`: verify checksums. For remote storage, `threads` download at most `ahead_bytes` ahead; the directory
    `cache`, if given, keeps up to `cache_bytes` of downloads.
    """

    verify: bool = True
    threads: int = 16
    ahead_bytes: int = 256 << 20
    cache: str = ""
    cache_bytes: int = 0


@dataclass(frozen=True)
class _TableGroup:
    """Row group `group`, of `rows` rows, of shard number `shard` of one table."""

    table: Table
    shard: int
    group: int
    rows: int
    columns: tuple[str, ...]

    @property
    def entry(self) -> Shard:
        return self.table.shards[self.shard]

    @property
    def place(self) -> str:
        return self.table.shard_url(self.shard)

    @property
    def bytes(self) -> int:
        """Estimated number of bytes to download, usually too high."""
        return -(-self.entry.bytes * self.rows // self.entry.rows)


class RowGroups:
    """Reads the row groups of several sources, numbered source by source, as row ids are. Thread-safe."""

    _downloads: "DownloadQueue[FetchedRanges] | None"

    def __init__(
        self,
        sources: list[Source],
        label_type: pa.DataType,
        inputs: InputKind = "tokens",
        reading: ReadOptions | None = None,
        dealt: np.ndarray | None = None,
    ) -> None:
        self._arguments = (sources, label_type, inputs, reading)
        self.sources = sources
        self._inputs = columns_of(inputs)
        self._label_type = label_type
        self._reading = reading or ReadOptions()
        joined = [source.negatives for source in sources if source.negatives is not None]
        self.width = max((table.width("label_ids") for table in joined), default=0)  # K of the joined negatives
        self._filtered = any(FILTERED in source.table.columns for source in sources)
        tables = [(source, source.table.groups) for source in sources]
        self._places = [
            (source, shard, within)  # row group `within` of the shard
            for source, groups in tables
            for shard, within in zip(groups.shard.tolist(), groups.group.tolist(), strict=True)
        ]
        self.group_rows = np.concatenate([*(np.diff(groups.first) for _, groups in tables), np.empty(0, np.int64)])
        self.first_row = offsets_of(self.group_rows)  # [M + 1]
        if dealt is None and any(source.share != ALL_ROWS for source in sources):
            dealt = np.concatenate([source.share.bounds(source.table) for source in sources])
        self.dealt = dealt  # [M, 2] rows of each row group that are dealt; None if all rows are dealt
        self.weighted_groups = tuple(WeightedGroups(len(groups), source.weight) for source, groups in tables)
        # Empty if every row is dealt once.
        self.mix = () if all(source.weight == 1 for source in sources) else self.weighted_groups
        self._tables = [table for s in sources for table in (s.table, s.negatives) if table is not None]
        self._remote = {table.url for table in self._tables if not storage.is_local(table.url)}
        self._cache = self._open_cache()
        self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowGroups, (*self._arguments, self.dealt)  # a copy in a worker does not look for the rows again

    def request(self, groups: Iterable[int]) -> None:
        """Start downloads of `groups` of remote tables, in bounded memory; name a group for each `read` to come."""
        self._after_fork()  # here only one thread is active; several read later
        if self._downloads is None:
            return
        self._downloads.request(
            (group, number)
            for group in groups
            for number, part in enumerate(self._tables_of(group))
            if part.table.url in self._remote
        )

    def close(self) -> None:
        """End the threads, drop downloads and close the files. A later read opens the files again."""
        self._after_fork()
        if self._downloads is not None:
            self._given_up.set()
            self._downloads.close()
            self._given_up.clear()
        self._shards.close()

    def read(self, group: int) -> pa.Table:
        """Read inputs, `label_ids`, filter pairs and joined negatives (`hard`). Raises TableError, StorageError."""
        self._after_fork()
        take = self._downloads.take if self._downloads is not None else lambda item: None
        rows, *negatives = [self._read(part, take((group, n))) for n, part in enumerate(self._tables_of(group))]
        if self._places[group][0].table.manifest.kind == "labels":
            ids = rows.column("label_id").to_numpy()
            positives = list_array(ids, np.arange(len(ids) + 1), self._label_type)
        else:
            positives = rows.column("label_ids").cast(pa.list_(self._label_type))
        columns = {**{name: rows.column(name) for name in self._inputs}, "label_ids": positives}
        if self._filtered:
            none = list_array(np.empty(0, np.int64), np.zeros(rows.num_rows + 1, np.int64), self._label_type)
            stated = rows.column(FILTERED) if FILTERED in rows.column_names else none
            columns[FILTERED] = stated.cast(pa.list_(self._label_type))
        if negatives:
            columns["hard"] = negatives[0].column("label_ids").cast(pa.list_(self._label_type, self.width))
        elif self.width:
            pads = pa.array(np.full(rows.num_rows * self.width, PAD), self._label_type)
            columns["hard"] = pa.FixedSizeListArray.from_arrays(pads, self.width)
        return pa.table(columns)

    def _open_cache(self) -> LocalCache | None:
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
            f"the row groups of {self._reading.threads} fetching threads (storage.fetch_threads) and one reader",
        )
        return cache

    def _reset(self) -> None:
        self._process = os.getpid()
        self._downloads = None  # otherwise, its methods would refer to this object and keep local files open
        if self._remote and (threads := self._reading.threads):
            size = lambda item: self._tables_of(item[0])[item[1]].bytes  # noqa: E731
            self._downloads = DownloadQueue(self._download, size, threads, self._reading.ahead_bytes)
        self._given_up = threading.Event()
        self._shards = ShardPool(Access(self._reading.verify, self._cache, self._given_up))

    def _after_fork(self) -> None:
        """Reset this object in a forked process, which does not have the threads to continue earlier work."""
        if self._process != os.getpid():
            self._reset()

    def _tables_of(self, group: int) -> list[_TableGroup]:
        """Return row group `group` of each table: the rows, and their negatives if there are any."""
        source, shard, within = self._places[group]
        rows = int(self.group_rows[group])
        column = "label_id" if source.table.manifest.kind == "labels" else "label_ids"
        names = (*self._inputs, column, *({FILTERED} & {*source.table.columns}))
        parts = [_TableGroup(source.table, shard, within, rows, names)]
        if source.negatives is not None:
            parts.append(_TableGroup(source.negatives, shard, within, rows, ("label_ids",)))
        return parts

    def _download(self, item: tuple[int, int]) -> FetchedRanges:
        group, number = item
        part = self._tables_of(group)[number]
        shard = self._shards.get(part.table.url, part.entry)
        with naming_damage(f"{part.place}, row group {part.group}"):
            return shard.fetch(part.group, part.columns)

    def _read(self, part: _TableGroup, pieces: FetchedRanges | None) -> pa.Table:
        shard = self._shards.get(part.table.url, part.entry)
        try:
            rows = read_group(shard, part.group, part.columns, part.place, pieces)
        except TableError:
            if shard.local:
                raise
            if self._cache:
                self._cache.discard(part.entry.sha256)
            # Bytes that were damaged in transfer may now arrive intact.
            rows = read_group(shard, part.group, part.columns, part.place)
        if rows.num_rows != part.rows:
            raise TableError(
                f"{part.place}, row group {part.group}: {rows.num_rows} rows, but the manifest records {part.rows}. "
                "Make the table again."
            )
        return rows


class ShardPool:
    """Most recently used shards: at most FILES, and at most BYTES of parsed data. Thread-safe."""

    FILES = 256
    BYTES = 256 << 20

    def __init__(self, access: Access) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Future[OpenShard]] = OrderedDict()
        self._bytes = 0

    def get(self, url: str, shard: Shard) -> OpenShard:
        """Return `shard` of the table at `url`; one thread opens it for the others. Raises TableError, StorageError."""
        place = shard_url(url, shard)
        with self._lock:
            is_new = place not in self._open
            future = self._open.setdefault(place, Future())
            self._open.move_to_end(place)
        if not is_new:
            return future.result()
        try:
            opened = open_shard(url, shard, self._access)
        except BaseException as error:
            with self._lock:
                self._open.pop(place, None)
            future.set_exception(error)
            raise
        future.set_result(opened)
        with self._lock:
            self._bytes += opened.memory
            self._evict()
        return opened

    def close(self) -> None:
        """Close local files; parsed remote files are kept."""
        with self._lock:
            for place, future in list(self._open.items()):
                if future.done() and future.result().local:
                    self._bytes -= self._open.pop(place).result().memory

    def _evict(self) -> None:
        """Drop the least recently used shards; a thread that still reads a shard keeps it."""
        for place in list(self._open):
            if (len(self._open) <= self.FILES and self._bytes <= self.BYTES) or len(self._open) == 1:
                return
            if self._open[place].done():
                self._bytes -= self._open.pop(place).result().memory


@dataclass
class _Download(Generic[T]):
    future: Future[T]
    size: int
    readers: int = 1


class DownloadQueue(Generic[T]):
    """Calls `download` for requested items, in order, on `threads` separate threads. Thread-safe, also after `close`.

    The total `size` of items in progress or waiting to be taken is at most `limit` bytes, unless it is one larger item.
    """

    def __init__(self, download: Callable[[Any], T], size: Callable[[Any], int], threads: int, limit: int) -> None:
        self._download, self._size, self._threads, self._limit = download, size, threads, limit
        self._lock = threading.Lock()
        self._reset()

    def request(self, items: Iterable[Hashable]) -> None:
        """Queue `items`. The caller must take each item once for each request."""
        with self._lock:
            self._waiting.extend(items)
            self._start_more()

    def take(self, item: Hashable) -> T | None:
        """Wait for the download of `item`, or raise its error; return None if its download has not begun."""
        with self._lock:
            download = self._started.get(item)
            if download is None:
                if item in self._waiting:
                    self._waiting.remove(item)
                return None
            download.readers -= 1
            if not download.readers:
                del self._started[item]
                self._held -= download.size
            self._start_more()
        return download.future.result()

    def close(self) -> None:
        """Cancel waiting requests, wait for downloads in progress, drop all downloads, and end the threads."""
        with self._lock:
            pool = self._pool
            self._reset()
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def _reset(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[Hashable] = deque()
        self._started: dict[Hashable, _Download[T]] = {}
        self._held = 0

    def _start_more(self) -> None:
        while self._waiting:
            item = self._waiting[0]
            started, size = self._started.get(item), self._size(item)
            if started is None and self._held and self._held + size > self._limit:
                return
            self._waiting.popleft()
            if started is not None:
                started.readers += 1
                continue
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=THREAD)
            self._started[item] = _Download(self._pool.submit(self._download, item), size)
            self._held += size
