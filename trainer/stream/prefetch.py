"""Work that is done in advance: downloads in bounded memory, and items that are yielded in order."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
