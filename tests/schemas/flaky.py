"""A bucket in memory that fails on request: a real fsspec filesystem, as an object store is one."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from schemas import owners, storage
from schemas.sizes import PATIENCE


class FlakyFileSystem(MemoryFileSystem):
    """`memory://` under another name; the next `failures` reads and writes raise, each a fault of the network."""

    protocol = "flaky"
    store: dict = {}
    pseudo_dirs = [""]
    failures = 0
    attempts = 0

    @classmethod
    def fail(cls, times: int) -> None:
        cls.failures, cls.attempts = times, 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("flaky://"))

    def cat_file(self, path, start=None, end=None, **kwargs):  # type: ignore[no-untyped-def]
        self._maybe_fail()
        return super().cat_file(path, start, end, **kwargs)

    def pipe_file(self, path, value, **kwargs):  # type: ignore[no-untyped-def]
        self._maybe_fail()
        return super().pipe_file(path, value, **kwargs)

    @classmethod
    def _maybe_fail(cls) -> None:
        cls.attempts += 1
        if cls.failures:
            cls.failures -= 1
            raise ConnectionResetError(104, "Connection reset by peer")


class LateFileSystem(MemoryFileSystem):
    """`memory://` under another name, whose listings are those of long ago: nothing is in them."""

    protocol = "late"
    store: dict = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("late://"))

    def ls(self, path, detail=True, **kwargs):  # type: ignore[no-untyped-def]
        return []


class Clock:
    """Seconds that pass only while somebody waits for storage: what `storage` and `owners` take for their clocks."""

    def __init__(self) -> None:
        self.now, self._lock = 1000.0, threading.Lock()

    def __call__(self) -> float:
        return self.now

    def pause(self, cancelled: threading.Event, seconds: float) -> None:
        """Wait, as `storage` does between two attempts."""
        cancelled.wait(0.0005)
        with self._lock:
            self.now += seconds


class AwayFileSystem(MemoryFileSystem):
    """`memory://` under another name: each request first asks `error`, which may return the error to raise."""

    protocol = "away"
    store: dict = {}
    pseudo_dirs = [""]
    error: Callable[[], Exception | None] = staticmethod(lambda: None)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("away://"))

    @classmethod
    def _ask(cls) -> None:
        if (error := cls.error()) is not None:
            raise error


def _asking(method: str):  # type: ignore[no-untyped-def]
    def ask(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self._ask()
        return getattr(MemoryFileSystem, method)(self, *args, **kwargs)

    return ask


for method in ("info", "ls", "find", "cat_file", "pipe_file", "put_file", "cp_file", "rm_file"):
    setattr(AwayFileSystem, method, _asking(method))


class NearFileSystem(AwayFileSystem):
    """The same store as AwayFileSystem's, as another machine reaches it."""

    protocol = "near"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.removeprefix("near://"))

    @classmethod
    def _ask(cls) -> None: ...


fsspec.register_implementation("away", AwayFileSystem, clobber=True)
fsspec.register_implementation("near", NearFileSystem, clobber=True)
fsspec.register_implementation("late", LateFileSystem, clobber=True)
fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)


@contextlib.contextmanager
def clocked(patch: pytest.MonkeyPatch, patience: str, slowest: float) -> Iterator[Clock]:
    """Yield the clock of storage and of claims until the block ends; `away://` is empty before, and there after it."""
    clock = Clock()
    patch.setattr(storage, "SLOWEST_SECONDS", slowest)
    patch.setattr(storage, "_clock", clock)
    patch.setattr(storage, "_pause", clock.pause)
    patch.setattr(owners, "_clock", clock)
    patch.setenv(PATIENCE, patience)
    AwayFileSystem.store.clear()
    yield clock
    AwayFileSystem.error = staticmethod(lambda: None)
