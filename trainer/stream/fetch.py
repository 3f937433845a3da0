"""Fetching ahead: what will be read next is on its way from storage while what is there is decoded."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

THREAD = "extremis-fetch"


@dataclass
class _Fetch(Generic[T]):
    future: Future[T]
    size: int
    readers: int = 1


class Fetcher(Generic[T]):
    """Calls `fetch` for items named ahead of their use, in that order, on `threads` threads of its own.

    What is under way or waits to be taken is at most `limit` bytes, by `size` of each item, or one item. Safe to use
    from several threads, and after `close`.
    """

    def __init__(self, fetch: Callable[[int], T], size: Callable[[int], int], threads: int, limit: int) -> None:
        self._fetch, self._size, self._threads, self._limit = fetch, size, threads, limit
        self._lock = threading.Lock()
        self._forget()

    def ahead(self, items: Iterable[int]) -> None:
        """Each item will be taken once for each time that it is named."""
        with self._lock:
            self._waiting.extend(items)
            self._start_more()

    def take(self, item: int) -> T | None:
        """What was fetched of `item`, waiting for it where it is under way; None where nothing was begun.

        Raises what `fetch` raised.
        """
        with self._lock:
            fetch = self._begun.get(item)
            if fetch is None:
                if item in self._waiting:
                    self._waiting.remove(item)
                return None
            fetch.readers -= 1
            if not fetch.readers:
                del self._begun[item]
                self._held -= fetch.size
            self._start_more()
        return fetch.future.result()

    def close(self) -> None:
        """Drop what was fetched, call off what waits, and end the threads; what is under way is waited for."""
        with self._lock:
            pool = self._pool
            self._forget()
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def _forget(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[int] = deque()
        self._begun: dict[int, _Fetch[T]] = {}
        self._held = 0

    def _start_more(self) -> None:
        while self._waiting:
            item = self._waiting[0]
            begun, size = self._begun.get(item), self._size(item)
            if begun is None and self._held and self._held + size > self._limit:
                return
            self._waiting.popleft()
            if begun is not None:
                begun.readers += 1
                continue
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=THREAD)
            self._begun[item] = _Fetch(self._pool.submit(self._fetch, item), size)
            self._held += size
