"""Work that is done in advance: downloads in bounded memory, and items that are yielded in order."""

import contextlib
import functools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from schemas import PAD, storage
from schemas.errors import TableError
from schemas.manifest import Shard, shard_url
from schemas.ragged import Ragged, offsets_of
from schemas.shard_files.parquet import list_array, list_column, matrix_column
from schemas.shard_files.ranges import Access, FetchedRanges, LocalCache, naming_damage
from schemas.shard_files.shards import OpenShard, open_shard, read_group
from schemas.shares import ALL_ROWS
from schemas.table import Table
from trainer.input_kinds import InputKind
from trainer.inputs import columns_of
from trainer.stream.order import EpochOrder, WeightedGroups, deal
from trainer.stream.sources import Source
from trainer.stream.window import FILTERED, Buffers, Window

T = TypeVar("T")
THREAD = "extremis-fetch"
# Pieces that yield items, in any threads; and a call that ends the work afterwards.
Opened = tuple[list[Callable[[], list[T]]], Callable[[], None]]


@dataclass(frozen=True)
class Work(Generic[T]):
    """Work that `tasks` prepare, in any threads and in any order, before `open` is called."""

    tasks: list[Callable[[], None]]
    open: Callable[[], Opened[T]]


def run_serially(works: Iterator[Work[T]]) -> Generator[T, None, None]:
    """Yield the items of `works`; all work is done in this thread, on demand."""
    for work in works:
        for task in work.tasks:
            task()
        pieces, close = work.open()
        for piece in pieces:
            yield from piece()
        close()


def run_in_threads(pool: Executor, works: Iterator[Work[T]], depth: int) -> Generator[T, None, None]:
    """Yield the items in order; the pool works on up to `depth` pieces ahead, and prepares the next of `works`.

    Tasks of the next work alternate with pieces of the current work, so that both make progress.
    """
    pieces: deque[tuple[Future[list[T]], Callable[[], None] | None]] = deque()

    def finish() -> list[T]:
        future, close = pieces.popleft()
        items = future.result()
        if close is not None:
            close()
        return items

    current = next(works, None)
    preparing = [pool.submit(task) for task in current.tasks] if current is not None else []
    while current is not None:
        for future in preparing:
            future.result()
        todo, close = current.open()
        following = next(works, None)
        tasks = deque(following.tasks if following is not None else [])
        preparing = []
        for number, piece in enumerate(todo, 1):
            pieces.append((pool.submit(piece), close if number == len(todo) else None))
            share = -(-len(tasks) // (len(todo) - number + 1))
            preparing += [pool.submit(tasks.popleft()) for _ in range(share)]
            if len(pieces) > depth:
                yield from finish()
        preparing += [pool.submit(task) for task in tasks]
        current = following
    while pieces:
        yield from finish()


@dataclass
class _Download(Generic[T]):
    future: Future[T]
    size: int
    readers: int = 1


class DownloadQueue(Generic[T]):
    """Calls `download` for requested items on `threads` separate threads, in the order of the requests.

    The total `size` of items in progress or waiting to be taken is at most `limit` bytes; a single item may be larger.
    Thread-safe, and usable after `close`.
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
        """Wait for the download of `item` and return it; None if its download has not begun.

        Raises the exceptions of `download`.
        """
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
    """Part of a row group in one table: `rows` rows in row group `group` of shard number `shard`."""

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
    """Reads the row groups of several sources. Thread-safe.

    Row groups and row ids are numbered source by source in storage order. Pickling the object leaves out open files and
    downloads.
    """

    _downloads: DownloadQueue[FetchedRanges] | None

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
        """Start downloads of `groups` for `read`; pass each group once for each time that it will be read.

        Tables on a local disk need no download. Requests beyond the memory limit wait until earlier row groups have
        been read.
        """
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
        """Read row group `group`: columns of the inputs, `label_ids`, filter pairs and, from joined negatives, `hard`.

        Raises TableError, which names the shard and the row group; StorageError.
        """
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
        """Open the cache. Raises InputError if the directory or the size is unsuitable."""
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
            self._downloads = DownloadQueue(self._download, self._bytes_of, threads, self._reading.ahead_bytes)
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

    def _bytes_of(self, item: tuple[int, int]) -> int:
        group, number = item
        return self._tables_of(group)[number].bytes

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


Damaged = Literal["stop", "skip"]
Task: TypeAlias = Callable[[], None]


class Decoding:
    """The decoding of window `window` of `streams`: run `tasks` in any threads, then call `result`.

    The rows [n] of the window are its concatenated segments. Lists stay as they were read from a row group; matrices,
    such as hard negatives, are copied.
    """

    def __init__(
        self, order: EpochOrder, groups: RowGroups, streams: Sequence[int], window: int, buffers: Buffers
    ) -> None:
        self._order, self._groups, self._streams, self._window, self._buffers = order, groups, streams, window, buffers
        self._segments = [segment for stream in streams for segment in order.segments(stream, window)]
        self._starts = np.cumsum([0, *(segment.stop - segment.start for segment in self._segments)])
        self._lists: list[pa.Table | None] = [None] * len(self._segments)
        self._matrices: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()
        self.tasks: list[Task] = [self._arrange]

    def _arrange(self) -> None:
        """Order the rows by batch, and find the end of each batch."""
        self._positions, self._offsets = deal([self._order.take(stream, self._window) for stream in self._streams])
        first_row = self._groups.first_row
        ids = [np.arange(s.start, s.stop) + first_row[s.group] for s in self._segments]
        self._rows = np.concatenate([np.empty(0, np.int64), *ids])[self._positions]

    def add(self, group: int, table: pa.Table) -> None:
        """Add row group `group` to all its segments. Thread-safe."""
        if names := _matrices_of(table):
            with self._lock:
                if not self._matrices:
                    self._matrices = self._lend(table, names, int(self._starts[-1]))
        matrices, table = {name: matrix_column(table, name) for name in names}, table.drop_columns(names)
        for number, segment in enumerate(self._segments):
            if segment.group == group:
                rows, start = segment.stop - segment.start, int(self._starts[number])
                self._lists[number] = table.slice(segment.start, rows)
                for name, values in matrices.items():
                    self._matrices[name][start : start + rows] = values[segment.start : segment.stop]

    def result(self) -> Window:
        """Return the window; no batch contains unread rows. Raises TableError if no row group can be decoded."""
        self.tasks.clear()  # tasks refer to this object: the cycle would keep the window until a garbage collection
        positions, rows, offsets, matrices = self._positions, self._rows, self._offsets, self._matrices
        sizes = np.diff(self._starts)
        missing = np.repeat([segment is None for segment in self._lists], sizes).astype(bool)
        like = next((segment for segment in self._lists if segment is not None), None)
        if like is None:  # fewer rows than streams, or all damaged: this rank takes as many steps as other ranks
            like = _read_no_rows(self._groups)
            names = _matrices_of(like)
            matrices, like = self._lend(like, names, 0), like.drop_columns(names)
            lists, positions, rows, offsets = [like], positions[:0], rows[:0], np.zeros_like(offsets)
        else:
            lists = [
                _blank(like.schema, int(size)) if segment is None else segment
                for segment, size in zip(self._lists, sizes, strict=True)
            ]
            if missing.any():
                kept = ~missing[positions]
                positions, rows, offsets = positions[kept], rows[kept], offsets_of(kept)[offsets]
        columns = {name: Ragged.join([list_column(each, name) for each in lists]) for name in like.column_names}
        return Window(columns, matrices, self._buffers, positions, rows, offsets, int(missing.sum()))

    def _lend(self, table: pa.Table, names: list[str], rows: int) -> dict[str, np.ndarray]:
        return {name: self._buffers.take(rows, table.schema.field(name).type) for name in names}


def _matrices_of(table: pa.Table) -> list[str]:
    return [field.name for field in table.schema if pa.types.is_fixed_size_list(field.type)]


def decodings(
    order: EpochOrder, groups: RowGroups, streams: Sequence[int], first: int, fetched: int, damaged: Damaged
) -> Iterator[Decoding]:
    """Yield the decoding of each window of `streams` from number `first` on; the decodings complete in order.

    Row groups are requested `fetched` windows ahead. A row group that spans two windows is read once, for both.
    """
    buffers = Buffers()
    readings = _readings(order, streams, first)
    ahead: deque[tuple[list[int], set[int]]] = deque()
    coming = Decoding(order, groups, streams, first, buffers)
    for window in range(first, order.windows):
        for reading in readings:
            groups.request(reading[0])
            ahead.append(reading)
            if len(ahead) > fetched:
                break
        needed, shared = ahead.popleft()
        current = coming
        if window + 1 < order.windows:
            coming = Decoding(order, groups, streams, window + 1, buffers)
        for group in needed:
            windows = [current, coming] if group in shared else [current]
            current.tasks.append(functools.partial(_read, group, groups, windows, damaged))
        yield current


def _readings(order: EpochOrder, streams: Sequence[int], first: int) -> Iterator[tuple[list[int], set[int]]]:
    """Yield for each window from `first` on: the row groups to read, and the row groups that the next window shares."""

    def groups_of(window: int) -> set[int]:
        return {segment.group for stream in streams for segment in order.segments(stream, window)}

    before: set[int] = set()
    needed = groups_of(first)
    for window in range(first, order.windows):
        following = groups_of(window + 1) if window + 1 < order.windows else set()
        shared = (needed & following) - before
        yield sorted(needed - before, key=lambda group: (group not in shared, group)), shared
        before, needed = shared, following


def _read(group: int, groups: RowGroups, windows: Sequence[Decoding], damaged: Damaged) -> None:
    """Read a row group and add it to `windows`. Raises TableError, unless damaged row groups are skipped."""
    try:
        table = groups.read(group)
    except TableError:
        if damaged == "stop":
            raise
        return
    for window in windows:
        window.add(group, table)


def _blank(schema: pa.Schema, rows: int) -> pa.Table:
    """Return `rows` rows of empty lists."""
    return pa.table({field.name: pa.nulls(rows, field.type) for field in schema})


def _read_no_rows(groups: RowGroups) -> pa.Table:
    """Return an empty table with the columns of the row groups. Raises TableError if no row group can be decoded."""
    last = len(groups.group_rows) - 1
    for number in range(last):
        with contextlib.suppress(TableError):
            return groups.read(number).slice(0, 0)
    return groups.read(last).slice(0, 0)
