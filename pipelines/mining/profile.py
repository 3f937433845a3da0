"""Profile of a mining run: seconds by stage and peak memory, kept beside the tables."""

import contextlib
import ctypes
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa


@dataclass
class Profile:
    """Profile of one or several work items: seconds add up over workers, the peak is of the largest process."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body of the `with` statement."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            self.peak_bytes = max(self.peak_bytes, peak_bytes())

    def add(self, other: "Profile") -> "Profile":
        """Count another one in."""
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        return self

    def facts(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "seconds": {name: round(value, 3) for name, value in sorted(self.seconds.items())},
            "peak_bytes": self.peak_bytes,
        }


def peak_bytes() -> int:
    """Return the most memory that this process has held since it started."""
    try:
        # Not `ru_maxrss`: a process inherits it from the one that started it.
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def release() -> None:
    """Give the memory of a discarded block back, so that the next one does not come on top of its fragments."""
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
