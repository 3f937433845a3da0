"""A bucket in memory that fails on request: a real fsspec filesystem, as an object store is one."""

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


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


fsspec.register_implementation("late", LateFileSystem, clobber=True)
fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
