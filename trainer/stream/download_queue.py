"""Queue of downloads: threads of its own request from storage what will be read next, in bounded memory."""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

THREAD = "extremis-fetch"


@dataclass
class _Download(Generic[T]):
    future: Future[T]
    size: int
    readers: int = 1


class DownloadQueue(Generic[T]):
    """Calls of `download` for items requested before their use, in that order, on `threads` threads of its own.

    Items in progress, or waiting to be taken, are at most `limit` bytes, by `size` of each item, or one item. Safe to
    use from several threads, and after `close`.
    """

    def __init__(self, download: Callable[[Any], T], size: Callable[[Any], int], threads: int, limit: int) -> None:
        self._download, self._size, self._threads, self._limit = download, size, threads, limit
        self._lock = threading.Lock()
        self._reset()

    def request(self, items: Iterable[Hashable]) -> None:
        """Queue `items`. Each is to be taken once for each time that it is requested."""
        with self._lock:
            self._waiting.extend(items)
            self._start_more()

    def take(self, item: Hashable) -> T | None:
        """Return what was downloaded of `item`, after waiting for it; None where its download has not begun.

        Raises what `download` raised.
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
        """Drop what was downloaded, cancel what waits, wait for what is in progress, and end the threads."""
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
