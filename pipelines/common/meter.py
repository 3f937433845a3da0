"""Counts of a pipeline's work, made on its workers: rows and bytes by step, for the launching process to show.

A worker leaves what it has counted in a file in staging, now and then: the job servers of Flink and Spark tell nothing
of Beam's metrics before a job has ended. These metrics, in which work that was done again counts once, are the last
word: `counts_of_result`.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from pipelines.common.exchange import Packet
from schemas import storage
from schemas.errors import ExtremisError
from schemas.storage import join

_NAMESPACE = "extremis"
_LOCAL_SECONDS, _REMOTE_SECONDS = 0.5, 5.0  # between two writes of a worker's file
_LOCK = threading.Lock()
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
        _tell_beam(step, rows, size, now)
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


def counts_of_result(result: Any) -> dict[str, Count]:
    """Return the counts of a finished pipeline from its PipelineResult; none where the runner keeps none."""
    from apache_beam.metrics import MetricsFilter

    counts: dict[str, Count] = {}
    with contextlib.suppress(Exception):  # of any kind: a runner without metrics, a job server that is gone
        measured = result.metrics().query(MetricsFilter().with_namespace(_NAMESPACE))
        for metric in measured["counters"]:
            step, _, unit = metric.key.metric.name.rpartition(".")
            more = Count(rows=metric.result) if unit == "rows" else Count(bytes=metric.result)
            counts[step] = counts.get(step, Count()).add(more)
        for metric in measured["distributions"]:
            step = metric.key.metric.name.rpartition(".")[0]
            span = Count(0, 0, metric.result.min / 1000, metric.result.max / 1000)
            counts[step] = counts.get(step, Count()).add(span)
    return counts


def _tell_beam(step: str, rows: int, size: int, now: float) -> None:
    from apache_beam.metrics import Metrics

    Metrics.counter(_NAMESPACE, f"{step}.rows").inc(rows)
    Metrics.counter(_NAMESPACE, f"{step}.bytes").inc(size)
    Metrics.distribution(_NAMESPACE, f"{step}.milliseconds").update(round(1000 * now))
