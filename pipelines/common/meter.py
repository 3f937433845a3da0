"""Counts of a pipeline's work, made on its workers: rows and bytes by step, for the launching process to show.

A worker leaves what it has counted in a file in staging, now and then: the job servers of Flink and Spark tell nothing
of Beam's metrics before a job has ended. The last word has the runner: what its workers answer, or Beam's metrics, in
which work that was done again counts once.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pipelines.common.exchange import Packet
from schemas import storage
from schemas.errors import ExtremisError
from schemas.storage import join

_NAMESPACE = "extremis"
_LOCAL_SECONDS, _REMOTE_SECONDS = 0.5, 5.0  # between two writes of a worker's file
_LOCK = threading.Lock()
_TOLD: list[Callable[[str, int, int, float], None]] = []  # step, rows, bytes, seconds: who counts besides, as Beam does
also_tell = _TOLD.append
K = TypeVar("K")


class Count(NamedTuple):
    """Work on one step: from the second `first` to the second `last` of the meter's clock."""

    rows: int = 0
    bytes: int = 0
    first: float = float("inf")
    last: float = 0.0

    def add(self, other: "Count") -> "Count":
        """Return both as one."""
        return Count(
            self.rows + other.rows,
            self.bytes + other.bytes,
            min(self.first, other.first),
            max(self.last, other.last),
        )


@dataclass
class _Counts:
    """Counts of this process, by step. `here`: the launching process, which reads them where they are."""

    here: bool = False
    steps: dict[str, Count] = field(default_factory=dict)
    written: float = 0.0  # monotonic seconds


_COUNTS: dict[str, _Counts] = {}  # by the meter's URL


@dataclass(frozen=True)
class Meter:
    """Counter of the steps of one command; its files are below `url`. `began`: seconds since 1970, there.

    Without a URL nothing is counted.
    """

    url: str = ""
    began: float = 0.0

    def start(self, step: str) -> None:
        """Note that `step` is at work, before its first rows are done."""
        self.count(step, 0)

    def count(self, step: str, rows: int, size: int = 0) -> None:
        """Count `rows` that a worker has done, and `size` bytes that it has written."""
        if not self.url:
            return
        now = max(0.0, time.time() - self.began)
        with _LOCK:
            counts = _COUNTS.setdefault(self.url, _Counts())
            counts.steps[step] = counts.steps.get(step, Count()).add(Count(rows, size, now, now))
            pause = _LOCAL_SECONDS if storage.is_local(self.url) else _REMOTE_SECONDS
            due = not counts.here and time.monotonic() - counts.written >= pause
            if due:
                counts.written = time.monotonic()
                body = json.dumps(counts.steps).encode()
        for tell in _TOLD:
            tell(step, rows, size, now)
        if due:
            # What is not told is not seen; the work goes on.
            with contextlib.suppress(ExtremisError, OSError):
                name = f"{socket.gethostname()}-{os.getpid()}.json"
                storage.write_bytes(join(self.url, name), body, durable=False)

    def count_bytes(self, step: str, sent: Iterable[tuple[K, Packet]]) -> Iterator[tuple[K, Packet]]:
        """Pass on what `step` sends, and count its bytes, all at once: there may be thousands of packets."""
        size = 0
        for key, packet in sent:
            size += len(packet) if isinstance(packet, bytes) else packet[2]
            yield key, packet
        self.count(step, 0, size)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Keep what this process counts in memory, where `read` finds it, until the block ends."""
        with _LOCK:
            _COUNTS[self.url] = _Counts(here=True)
        try:
            yield
        finally:
            with _LOCK:
                del _COUNTS[self.url]

    def read(self) -> list[dict[str, Count]]:
        """Return what each process has counted so far. Raises StorageError."""
        with _LOCK:
            own = dict(_COUNTS[self.url].steps) if self.url in _COUNTS else {}
        if own:  # who works here works alone
            return [own]
        counts = []
        for name in storage.list_names(self.url):
            with contextlib.suppress(FileNotFoundError, ValueError):
                steps = json.loads(storage.read_bytes(join(self.url, name)))
                counts.append({step: Count(*count) for step, count in steps.items()})
        return counts


def sum_counts(many: Iterable[Mapping[str, Count]]) -> dict[str, Count]:
    """Add up the counts of each step."""
    total: dict[str, Count] = {}
    for counts in many:
        for step, count in counts.items():
            total[step] = total.get(step, Count()).add(count)
    return total


def counted_here() -> dict[str, Count]:
    """Return all that this process has counted."""
    with _LOCK:
        return sum_counts(counts.steps for counts in _COUNTS.values())
