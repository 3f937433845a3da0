"""Output: what a terminal, a pipe, a notebook, a listener and a collector of logs get; and a command's results.

A line of progress is an `Event`, which the logger `extremis` hands to its handlers: `_Progress`, which shows it, and
the log of a run. The results of a command go to standard output. rich draws bars and tables, and is loaded for them.
"""

import contextlib
import functools
import io
import json
import logging
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from schemas.errors import AccessError, ExtremisError, failure_of, option, redact, without_controls
from schemas.logs import LOG_FORMAT, json_line, log_as, logs_json, write_line
from schemas.sizes import say_count
from schemas.waits import Wait, add_listener

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_NOT_SHOWN = dict.fromkeys((7, 8, 11, 12, 13))  # bells, returns and feeds, which rich also removes


class _Channel:
    """A standard stream for human-readable output; removes credentials and, on a terminal, control characters.

    `width`: characters per line of a table; None: the terminal's width.
    """

    def __init__(self, name: Literal["stdout", "stderr"], width: int | None) -> None:
        self._name, self._width = name, width

    @property
    def file(self) -> Any:
        """The current stream; None if it is closed. A progress bar replaces the stream to print above the bar."""
        file = getattr(sys, self._name)
        return file if self._name == "stderr" else getattr(file, "rich_proxied_file", file)

    @property
    def is_terminal(self) -> bool:
        return self.file is not None and not self.file.closed and self.file.isatty()

    @functools.cached_property
    def rich(self) -> "Console":
        """The same stream for bars, tables and styles. It prints texts literally, and does not clean them."""
        from rich.console import Console

        stderr = self._name == "stderr"
        return Console(stderr=stderr, width=self._width, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def print(self, text: Any, end: str = "\n", style: str | None = None) -> None:
        """Print a text, or an object that rich renders. Raises StorageError, ClosedPipe."""
        _activity.clear()
        if not isinstance(text, str):
            self.rich.print(text, end=end)
        elif style is not None and self.is_terminal:
            self.rich.print(self.clean(text), end=end, style=style)
        elif self.file is not None:
            self.file.write(self.clean(text).translate(_NOT_SHOWN) + end)
            self.file.flush()

    def clean(self, text: str) -> str:
        """Return a text without credentials and control characters."""
        return without_controls(redact(text)) if self.is_terminal else redact(text)


class _Messages(_Channel):
    """Channel for messages; if a message cannot be written, it is dropped without an error."""

    def print(self, text: Any, end: str = "\n", style: str | None = None) -> None:
        if logs_json():
            write_line(json_line("info", "output", str(text).rstrip()))
            return
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed file
            super().print(text, end, style)


class _Results(_Channel):
    """Channel for results, which go where the current output says."""

    def print(self, text: Any, end: str = "\n", style: str | None = None) -> None:
        if _output.results == "stdout":
            with contextlib.suppress(ClosedPipe):  # does not change the work and its exit status
                super().print(text, end, style)
        elif _output.results == "stderr" and not _output.quiet and not logs_json():  # a collector has the object
            messages.print(text, end, style)


class ClosedPipe(Exception):
    """The reader of standard output has closed the pipe. Not an OSError, because other broken pipes raise OSErrors."""


class _Stream(io.FileIO):
    """A command's standard output (1) or error (2). Only the first failed write to standard output raises an error."""

    _failed = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            is_lost, self._failed = self._failed or self.fileno() == 2, True
            if is_lost:
                return len(data)
            if isinstance(error, BrokenPipeError):
                raise ClosedPipe from None
            raise failure_of(error)(
                f"cannot write to standard output: {error.strerror}. Redirect it to another location."
            ) from error


def open_streams() -> None:
    """Set up a command's standard streams so that closed streams, full disks and broken pipes are handled."""
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a new file would get the number of a closed stream
        os.set_inheritable(null, True)
    os.close(null)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and (stream is not None or number == 2):
            raw = io.BufferedWriter(_Stream(number, "w", closefd=False))
            form = getattr(stream, "encoding", "utf-8"), getattr(stream, "errors", "replace")
            setattr(sys, name, io.TextIOWrapper(raw, *form, line_buffering=number == 2 or raw.isatty()))


_ROLES = {"train": "trainer", "run": "trainer", "mine": "miner", "cluster": "miner"}


def set_log_format(words: Sequence[str]) -> None:
    """Prepare the logs of the command line `words` before it is parsed, because errors of parsing belong to them."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.partition("=")[0] == "--log-format":
            os.environ[LOG_FORMAT] = word.partition("=")[2] or following
    command = next((word for word in words if not word.startswith("-")), "extremis")
    rank = f"/rank {os.environ.get('RANK', '0')}" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    log_as(_ROLES.get(command, command) + rank)


@dataclass(frozen=True)
class Event:
    """A line of progress. Events of a progress bar have a `title`, the number `done`, and the `total` if known.

    `kind`: message, progress, activity, wait, warning, epoch or miner. `fields`: its other numbers and texts.
    """

    text: str
    title: str = ""
    done: int | None = None
    total: int | None = None
    kind: str = "message"
    fields: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Output:
    """Destinations of output: progress goes to `listener`, else to standard error unless `quiet`; results to `results`.

    `verbose`: lines of progress begin with the seconds since the start. `command`: the running command line.
    `log_only`: only the run's log receives lines, except lines of bars. `bars`: a terminal shows bars. `remaining`:
    describes the command's remaining time, given the finished fraction of the current phase. `unkept`: failures of
    `keep`, which `results_first` tells.
    """

    listener: Callable[[Event], object] | None = None
    quiet: bool = False
    verbose: bool = False
    results: Literal["stdout", "stderr", "nowhere"] = "stdout"
    command: str = ""
    log_only: bool = False
    bars: bool = True
    remaining: Callable[[float], str] | None = None
    unkept: list[ExtremisError | str] | None = None


# Messages go to standard error, results to standard output.
_width_is_known = os.isatty(1) or "COLUMNS" in os.environ  # streams of a daemon may be None or closed
_width = None if _width_is_known else 200
messages, results = _Messages("stderr", None if os.isatty(2) else _width), _Results("stdout", _width)
_output, _began = Output(), time.monotonic()


@contextlib.contextmanager
def output(**changes: Any) -> Iterator[None]:
    """Change fields of the current `Output`, in all threads, until the block ends."""
    global _output
    before, _output = _output, replace(_output, **changes)
    try:
        yield
    finally:
        _output = before


def keep(place: str, write: Callable[[], object], asked: bool = False) -> bool:
    """Keep results at `place` by `write`; return whether they are kept. `results_first` tells a failure as an error.

    It is a line where only permission is missing, and the place was not `asked` for.
    """
    try:
        write()
    except ExtremisError as error:
        if _output.unkept is None:
            raise
        is_refused = isinstance(error, AccessError) and not asked
        why = f"{place}: not kept, because this user may not write there; keep it elsewhere with {option('out')}"
        _output.unkept.append(why if is_refused else error)
        return False
    return True


@contextlib.contextmanager
def results_first() -> Iterator[None]:
    """Tell at the end of the block, which shows results, what `keep` could not keep. Raises ExtremisError."""
    with output(unkept=(unkept := list[ExtremisError | str]())):
        yield
        for failure in unkept:
            if isinstance(failure, ExtremisError):
                raise failure
            say(failure, kind="warning")


def current_output() -> Output:
    """Return the current output."""
    return _output


class _Progress(logging.Handler):
    """Shows lines of progress: to the listener, or on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        event = record.msg if isinstance(record.msg, Event) else Event(record.getMessage())
        if _output.log_only and not _output.verbose and not event.title:
            return
        if _output.listener is not None:
            _output.listener(event)
        elif not _output.quiet:
            _show(event)


logger = logging.getLogger("extremis")
logger.propagate = False
logger.addHandler(_Progress())


def _emit(event: Event) -> None:
    level = logging.WARNING if event.kind in _WARNINGS else logging.INFO
    # Not `logger.log`: libraries switch other loggers off, by logging.disable or a configuration of their own.
    logger.callHandlers(logger.makeRecord(logger.name, level, "", 0, event, (), None))


def _show(event: Event) -> None:
    if logs_json():
        _activity.clear()
        progress = {"title": event.title, "done": event.done, "total": event.total} if event.title else {}
        level = "warning" if event.kind in _WARNINGS else "info"
        write_line(json_line(level, event.kind, event.text, **progress, **event.fields))
    else:
        seconds = f"{time.monotonic() - _began:7.1f} s  " if _output.verbose else ""
        messages.print(f"{seconds}{event.text}")


_KINDS = {"odd: ": "warning", "waiting for ": "wait"}  # of lines, by how they begin
_WARNINGS = ("warning", "miner")  # kinds


def say(message: str, kind: str = "", **fields: Any) -> None:
    """Print one line of progress. `kind`: the kind of its event; `fields`: what the event has besides its text."""
    kind = kind or next((kind for start, kind in _KINDS.items() if message.startswith(start)), "message")
    _emit(Event(redact(message), kind=kind, fields=fields))


# One rank of each machine reports waits; a library does not.
add_listener(lambda line: say(line) if _output.command and os.environ.get("LOCAL_RANK", "0") == "0" else None)


def fail(message: str, status: int, kind: str) -> NoReturn:
    """Print the message of an error that ends the command, also if progress is not shown, and exit with `status`."""
    if logs_json():
        write_line(json_line("error", "error", message, kind=kind, status=status))
    else:
        messages.print(message)
    sys.exit(status)


def relay(line: str, process: str) -> str:
    """Return the message in a line that `process` has written to standard error; if logs are JSON, pass the line on."""
    try:
        message = str(json.loads(line)["message"])
    except (ValueError, TypeError, KeyError):  # a text of a library
        message, line = line.rstrip(), json_line("info", "output", line.rstrip(), process=process)
    if logs_json() and not _output.quiet and _output.listener is None:
        write_line(line)
    return message


def print_json(body: Mapping[str, Any]) -> None:
    """Print the JSON object at the end of a command with `--json`."""
    _Channel.print(results, json.dumps(body))


def print_file(path: str) -> None:
    """Copy a file to standard output; on a terminal, replace control characters."""
    _activity.clear()
    with open(path, "rb") as file:
        if sys.stdout.isatty():
            for line in file:
                sys.stdout.buffer.write(without_controls(line.decode(errors="replace")).encode())
        else:
            shutil.copyfileobj(file, sys.stdout.buffer)
    sys.stdout.buffer.flush()


_SPINNER_AFTER = 0.2  # seconds of silence before the spinner of a terminal
_LINES_AFTER, _LONGEST = 5.0, 30.0  # seconds of silence before the first line elsewhere, doubled after each line
_FRAMES, _PLAIN_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"


class _Activity(Wait):
    """What this process does, shown while it prints nothing: a spinner on a terminal, elsewhere an occasional line.

    The thread that reports waits shows it. rich's spinner would stay in the streams of forked processes.
    """

    is_told = False

    def __init__(self) -> None:
        super().__init__("the command")
        self.reset()

    def reset(self) -> None:
        """Forget all, as in a forked process, where another thread may have held the lock."""
        self._lock = threading.RLock()
        self._text, self._began, self._printed, self._pause = "", 0.0, 0.0, _LINES_AFTER
        self._bars, self._is_drawn = 0, False

    def begin(self, text: str) -> None:
        """Set what the process does from now on; "": nothing is shown."""
        with self._lock:
            self._text, self._began = text, time.monotonic()
            self.clear()

    def clear(self) -> None:
        """Make room for a line, and begin a new silence."""
        with self._lock:
            if self._is_drawn:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
            self._is_drawn, self._printed, self._pause = False, time.monotonic(), _LINES_AFTER

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Show nothing until the block ends, because a bar shows progress."""
        self._add_bars(1)
        try:
            yield
        finally:
            self._add_bars(-1)

    def _add_bars(self, more: int) -> None:
        with self._lock:
            self.clear()
            self._bars += more

    def report(self) -> None:
        """Show the activity, if it is due."""
        with self._lock:
            if self._bars or not self._text:
                return
            left = _output.remaining(0.0) if _output.remaining else ""
            line = f"{self._text}, {time.monotonic() - self._began:.0f} s, {left}".removesuffix(", ")
            silence = time.monotonic() - self._printed
            if messages.is_terminal and silence > _SPINNER_AFTER:
                frames = _FRAMES if "utf" in (sys.stderr.encoding or "").lower() else _PLAIN_FRAMES
                sys.stderr.write(f"\r{frames[int(4 * silence) % len(frames)]} {line}\x1b[K")
                sys.stderr.flush()
                self._is_drawn = True
            elif not messages.is_terminal and silence > self._pause:
                pause = min(_LONGEST, 2 * self._pause)
                _show(Event(line, kind="activity"))
                self._pause = pause


_activity = _Activity()
os.register_at_fork(after_in_child=_activity.reset)
show_activity = _activity.begin


@contextlib.contextmanager
def show_spinner(title: str) -> Iterator[None]:
    """Show on rank 0 that `title` is running, until the block ends; not if output is quiet or goes to a listener."""
    if _output.quiet or _output.listener is not None or os.environ.get("RANK", "0") != "0":
        yield
        return
    show_activity(title)
    try:
        with _activity:
            yield
    finally:
        show_activity("")


_BAR_SECONDS = 30.0  # between two lines of a bar without a terminal


class _Bars:
    """Bars by title. A terminal shows them; a listener gets all events, others one every _BAR_SECONDS.

    A collector also gets the last event of each bar. `counted`: the bars have counts and times beside their notes.
    `lines`: there are also events where nobody needs them for a display.
    """

    def __init__(self, counted: bool, lines: bool, quiet: bool = False) -> None:
        is_shown = not (quiet or _output.quiet)
        on_terminal = messages.is_terminal and not logs_json()
        self._is_drawn = is_shown and on_terminal and _output.bars and _output.listener is None
        self._is_told = is_shown and (lines or _output.listener is not None or logs_json())
        self._counted, self._began = counted, time.monotonic()
        self._tasks: dict[str, Any] = {}
        self._due: dict[str, float] = {}
        self._last: dict[str, Event] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Any:
        if not self._is_drawn:
            self._stack.enter_context(_activity.hidden())
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        for event in self._last.values():
            _show(event)

    def _draw(self) -> "Progress":
        from rich import progress

        texts = "{task.description}", "{task.fields[note]}"
        title, note = (progress.TextColumn(text, markup=False) for text in texts)
        counts = progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
        columns = title, progress.BarColumn(), *(counts if self._counted else ()), note
        self._stack.enter_context(_activity.hidden())
        return self._stack.enter_context(progress.Progress(*columns, console=messages.rich, transient=True))

    def _show(self, title: str, done: int, total: int | None, note: str, text: str) -> None:
        if self._is_drawn:
            if not self._tasks:
                self._progress = self._draw()
            if title not in self._tasks:
                self._tasks[title] = self._progress.add_task(messages.clean(title), total=total, note="")
            self._progress.update(self._tasks[title], completed=done, total=total, note=messages.clean(note))
        elif self._is_told:
            event, now = Event(text, title, done, total, "progress"), time.monotonic()
            if now >= self._due.setdefault(title, self._began + _BAR_SECONDS):
                self._due[title] = now + _BAR_SECONDS
                self._last.pop(title, None)
                _emit(event)
            elif _output.listener is not None:
                _output.listener(event)
            elif logs_json():
                self._last[title] = event


class Bar(_Bars):
    """A progress bar on a terminal, else a plain line every _BAR_SECONDS. `total`: None if not known yet.

    `quiet`: print nothing. Use as a context manager.
    """

    def __init__(self, title: str, total: int | None, quiet: bool = False) -> None:
        super().__init__(counted=True, lines=True, quiet=quiet)
        self._title, self._total, self._done = title, total, 0

    def __enter__(self) -> "Bar":
        super().__enter__()
        if self._is_drawn:
            self.update(0)
        return self

    def update(self, done: int, note: str = "", total: int | None = None) -> None:
        """Show `done` of the total. `total`: the new total, if it has changed."""
        self._total = self._total if total is None else total
        if _output.remaining is not None and self._total and (left := _output.remaining(done / self._total)):
            note = f"{note}  in all {left}".strip()
        text = f"{self._title}: {say_count(done, self._total)} {note}".rstrip()
        self._show(self._title, done, self._total, note, text)

    def advance(self, more: int) -> None:
        """Add `more` to the number done."""
        self._done += more
        self.update(self._done)


class StepBars(_Bars):
    """Progress of a pipeline: a bar per step on a terminal, events for a listener or a collector, otherwise no output.

    A context manager that yields a function. Call the function with the steps that have begun
    (`pipelines.progress.StepProgress`). It shows these steps, and returns whether they were shown.
    """

    def __init__(self) -> None:
        super().__init__(counted=False, lines=False)
        self._finished: set[str] = set()

    def __enter__(self) -> Callable[[Sequence[Any]], bool]:
        super().__enter__()
        return self._show_steps

    def _show_steps(self, steps: Sequence[Any]) -> bool:
        for step in steps:
            if step.name not in self._finished:
                self._show(step.name, step.rows, step.total, step.state, str(step))
            if step.is_finished:
                self._finished.add(step.name)
        return self._is_drawn or (self._is_told and bool(steps))


say.display = StepBars  # type: ignore[attr-defined]  # pipelines that get `say` show their steps with it


_KNOWN = 0.1  # share of a phase after which its own pace gives the estimate


class RemainingTime:
    """Estimates the remaining time of a command with phases. `limit`: limit in seconds for all phases together."""

    def __init__(self, limit: float = math.inf) -> None:
        self._began = self._phase_began = time.monotonic()
        self._limit, self._expected = limit, 0.0
        self._after: Callable[[float], float] = lambda own: 0.0
        self._first = 0.0, 0.0

    def begin(self, expected: float, after: Callable[[float], float]) -> None:
        """Begin a phase of `expected` seconds (0: unknown); `after`: seconds of later phases, given this phase's."""
        self._phase_began, self._expected, self._after = time.monotonic(), expected, after
        self._first = 0.0, 0.0  # share at the first call, and the seconds before it: the set-up

    def __call__(self, share: float = 0.0) -> str:
        """Return a text such as "about 2 min left", for a finished fraction `share` of the phase.

        Returns "" while nothing is known. A phase that takes longer than expected, and whose pace is not known, is
        expected to take a quarter of its time again.
        """
        spent = time.monotonic() - self._phase_began
        if share and not self._first[0]:
            self._first = share, spent
        paced = share - self._first[0]
        if paced >= _KNOWN:
            own = spent + (spent - self._first[1]) / paced * (1 - share)
        elif self._expected:
            own = max(self._expected, 1.25 * spent)
        else:
            return ""
        left, of_limit = own - spent + self._after(own), self._limit - (time.monotonic() - self._began)
        left = max(min(left, of_limit) if of_limit > 0 else left, 1.0)
        return f"about {left:.0f} s left" if left < 100 else f"about {left / 60:.0f} min left"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table; the first `left` columns are left-aligned, the others right-aligned; no number is truncated."""
    from rich.table import Table

    grid = Table(title=results.clean(title), title_justify="left", title_style="bold")
    for number, column in enumerate(map(results.clean, columns)):
        grid.add_column(column, justify="left" if number < left else "right", no_wrap=not number, overflow="fold")
    for row in rows:
        grid.add_row(*map(results.clean, row))
    results.print(grid)


def format_value(value: Any) -> str:
    """Format a value for human readers."""
    if isinstance(value, bool) or value is None:
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def format_metric(report: Mapping[str, Any], name: str) -> str:
    """Format a metric with half the width of its 95 % interval, from an evaluation report; "" if it is missing."""
    if name not in report["metrics"]:
        return ""
    low, high = report["intervals"][name]
    return f"{report['metrics'][name]:.2f} ±{(high - low) / 2:.2f}"


def metric_grid(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return (columns, rows) with a row for each metric at every k, and half the width of each 95 % interval."""
    families: dict[str, dict[int, str]] = {}
    for name in report["metrics"]:
        family, k = name.split("@")
        families.setdefault(family, {})[int(k)] = format_metric(report, name)
    ks = sorted({k for by_k in families.values() for k in by_k})
    rows = [[family, *(by_k.get(k, "") for k in ks)] for family, by_k in families.items()]
    return ["%", *(f"@{k}" for k in ks)], rows
