"""Progress of a pipeline: workers count rows and bytes per step, and the launching process shows the counts.

Each worker periodically writes its counts to a file in staging, because the job servers of Flink and Spark report
Beam's metrics only at the end of a job. The runner provides the final counts, either from the results of its workers or
from Beam's metrics, which count repeated work only once.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from pipelines.flow import Packet
from schemas import storage
from schemas.errors import ExtremisError
from schemas.sizes import say_bytes, say_count
from schemas.states import showing
from schemas.storage import join

_LOCAL_SECONDS, _REMOTE_SECONDS = 0.5, 5.0  # between two writes of a worker's file, and two reads of all files
_LOCK = threading.Lock()
# Other counters, such as Beam's, which get (step, rows, bytes, seconds).
_LISTENERS: list[Callable[[str, int, int, float], None]] = []
add_listener = _LISTENERS.append
K = TypeVar("K")


class Count(NamedTuple):
    """Work done in one step between the times `first` and `last`, in seconds on the meter's clock."""

    rows: int = 0
    bytes: int = 0
    first: float = float("inf")
    last: float = 0.0

    def add(self, other: "Count") -> "Count":
        return Count(
            self.rows + other.rows, self.bytes + other.bytes, min(self.first, other.first), max(self.last, other.last)
        )


# Counts of this process by step, and the time of the last write (monotonic seconds; infinite in the launching process,
# which reads its counts from memory), both by the meter's URL.
_COUNTS: defaultdict[str, dict[str, Count]] = defaultdict(dict)
_WRITTEN: defaultdict[str, float] = defaultdict(float)


@dataclass(frozen=True)
class Meter:
    """Counter for the steps of one command, with files under `url`. `began` is the start time, in seconds since 1970.

    Without a URL nothing is counted.
    """

    url: str = ""
    began: float = 0.0

    def start(self, step: str) -> None:
        """Record that `step` has started, before its first rows are done."""
        self.count(step, 0)

    def count(self, step: str, rows: int, size: int = 0) -> None:
        """Count `rows` that a worker has finished, and `size` bytes that it has written."""
        if not self.url:
            return
        now = max(0.0, time.time() - self.began)
        with _LOCK:
            counts = _COUNTS[self.url]
            counts[step] = counts.get(step, Count()).add(Count(rows, size, now, now))
            due = time.monotonic() - _WRITTEN[self.url] >= _pause(self.url)
            if due:
                _WRITTEN[self.url] = time.monotonic()
                body = json.dumps(counts).encode()
        for listener in _LISTENERS:
            listener(step, rows, size, now)
        if due:
            # Counts that cannot be written are not shown; the work continues.
            with contextlib.suppress(ExtremisError, OSError):
                name = f"{socket.gethostname()}-{os.getpid()}.json"
                storage.write_bytes(join(self.url, name), body, durable=False)

    def count_bytes(self, step: str, sent: Iterable[tuple[K, Packet]]) -> Iterator[tuple[K, Packet]]:
        """Yield the packets that `step` sends; for speed, count the bytes of all packets only once, at the end."""
        size = 0
        for key, packet in sent:
            size += packet[2]
            yield key, packet
        self.count(step, 0, size)

    def read(self) -> list[dict[str, Count]]:
        """Return what each process has counted so far. Raises StorageError."""
        with _LOCK:
            counts = [dict(_COUNTS[self.url])]
        for name in storage.list_names(self.url):
            with contextlib.suppress(FileNotFoundError, ValueError):
                steps = json.loads(storage.read_bytes(join(self.url, name)))
                counts.append({step: Count(*count) for step, count in steps.items()})
        return counts


def _pause(url: str) -> float:
    return _LOCAL_SECONDS if storage.is_local(url) else _REMOTE_SECONDS


def sum_counts(many: Iterable[Mapping[str, Count]]) -> dict[str, Count]:
    """Add up the counts of each step."""
    total: dict[str, Count] = {}
    for counts in many:
        for step, count in counts.items():
            total[step] = total.get(step, Count()).add(count)
    return total


def process_counts() -> dict[str, Count]:
    """Return all counts of this process, per step."""
    with _LOCK:
        return sum_counts(_COUNTS.values())


# A receiver of lines. A receiver with a context manager `display()` shows steps by itself: see `Watch`.
Progress = Callable[[str], None]

_FIRST_LINE, _LINES = 0.5, 30.0  # seconds before the first line, and between lines, without a display


def silent(line: str) -> None: ...


def say_use(use_from: int | None) -> str:
    return "" if use_from is None else f", for use from epoch {use_from}"


@dataclass(frozen=True)
class StepProgress:
    """State of a step that has started: rows done out of `total` (None: unknown), number of processes, and time."""

    name: str
    rows: int
    total: int | None
    bytes: int
    seconds: float
    workers: int
    last: float  # time of its latest progress, by the meter's clock
    is_finished: bool = False

    @property
    def state(self) -> str:
        """Text that shows rows done, rows per second, time left, and workers."""
        parts = [f"{say_count(self.rows, self.total)} rows"]
        if self.seconds > 0 and self.rows:
            rate = self.rows / self.seconds
            parts.append(f"{rate:,.0f} rows/s")
            if self.total is not None and not self.is_finished:
                parts.append(f"{say_seconds((self.total - self.rows) / rate)} left")
        return ", ".join([*parts, f"{self.workers} worker{'s' * (self.workers != 1)}"])

    def __str__(self) -> str:
        return f"{self.name}: {self.state}"


def say_seconds(seconds: float) -> str:
    """Format a duration for display: 8 s, 1:05 min, 2:10 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02} min" if whole < 3600 else f"{whole // 3600}:{whole % 3600 // 60:02} h"


class Watch:
    """Display of the steps of one command's flows. Workers count with `meter`.

    `progress` periodically receives a line of text. If `progress` has a context manager `display()` that returns a
    function, this function periodically receives the steps that have started. If the function returns True, it has
    shown the steps itself, and no lines are sent.
    """

    def __init__(self, staging: str, progress: Progress) -> None:
        self.staging = staging
        self.meter = Meter(join(staging, "progress"), time.time())
        _COUNTS[self.meter.url], _WRITTEN[self.meter.url] = {}, float("inf")  # the launching process writes no file
        self._say = progress
        self._pause = _pause(staging)
        self._display = getattr(progress, "display", None)
        self._totals: dict[str, int | None] = {}
        self._finished: dict[str, Count] = {}  # steps of flows that have ended
        self._workers: dict[str, int] = {}
        self._current: StepProgress | None = None

    def expect(self, totals: Mapping[str, int | None]) -> None:
        """Set the steps of the next flow, in order, with the approximate number of rows of each step (None: unknown).

        If an earlier flow has a step with the same name, that step continues: its rows are summed over all flows.
        """
        self._totals |= totals
        self._finished = {name: count for name, count in self._finished.items() if name not in totals}

    @contextlib.contextmanager
    def watching(self) -> Iterator[Callable[[Mapping[str, Count]], None]]:
        """Show progress until the `with` block ends. Yields a function that takes the runner's counts of all flows."""
        ended = threading.Event()
        with self._display() if self._display else contextlib.nullcontext() as show, showing(self._facts):
            thread = threading.Thread(target=self._look, args=(ended, show), name="extremis-watch", daemon=True)
            thread.start()
            try:
                yield self._settle
            finally:
                ended.set()
                thread.join()

    def steps(self) -> list[StepProgress]:
        """Return the steps that have started, in order. Raises StorageError."""
        return self._states(self._merged())

    def _facts(self) -> dict[str, str | int | None]:
        step = self._current
        return {} if step is None else {"stage": step.name, "rows": step.rows, "rows_total": step.total}

    def summarize(self) -> None:
        """Report rows, seconds and bytes of each finished step."""
        parts = [
            f"{step.name} {step.rows:,} rows in {step.seconds:.1f} s"
            + (f" ({say_bytes(step.bytes)})" if step.bytes else "")
            for step in self._states(self._finished)
        ]
        if parts:
            self._say(f"steps: {'; '.join(parts)}")

    def _states(self, begun: Mapping[str, Count]) -> list[StepProgress]:
        states, now = [], time.time() - self.meter.began
        for name, total in self._totals.items():
            if (count := begun.get(name)) is not None:
                finished, rows, workers = name in self._finished, count.rows, self._workers.get(name, 1)
                if finished or total is None:
                    total = rows if finished else None
                else:
                    rows = min(rows, total)  # work may be repeated
                done = finished or rows == total
                seconds = max((count.last if done else now) - count.first, 0.0)
                states.append(StepProgress(name, rows, total, count.bytes, seconds, workers, count.last, done))
        return states

    def _merged(self) -> dict[str, Count]:
        processes = self.meter.read()
        self._workers |= Counter(name for process in processes for name in process)
        return sum_counts(processes) | self._finished

    def _settle(self, counts: Mapping[str, Count]) -> None:
        """Store the counts of a finished flow from the runner or, if the runner does not count, from the workers."""
        with contextlib.suppress(ExtremisError, OSError):
            self._finished |= self._merged()
        self._finished |= counts

    def _look(self, ended: threading.Event, show: Callable[[Sequence[StepProgress]], bool] | None) -> None:
        began = time.monotonic()
        line_due = began + _FIRST_LINE
        pause = min(_FIRST_LINE, self._pause)
        while not ended.wait(pause):
            steps: list[StepProgress] = []
            with contextlib.suppress(ExtremisError, OSError):
                steps = self.steps()
            at_work = [step for step in steps if not step.is_finished]
            self._current = max(at_work, key=lambda step: step.last, default=None)
            pause = self._pause
            if show is not None and show(steps):
                continue
            if time.monotonic() >= line_due:
                line_due = time.monotonic() + _LINES
                waited = f"the workers are starting, {say_seconds(time.monotonic() - began)}"
                self._say(str(self._current or waited))
