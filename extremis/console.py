"""Output for people: progress bars on a terminal, plain lines elsewhere, tables, and one JSON object on request."""

import contextlib
import functools
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from extremis.spinner import clear_spinner, hidden_spinner, run_spinner
from schemas.errors import failure_of, redact, without_controls
from schemas.sizes import say_count
from schemas.waits import add_listener

if TYPE_CHECKING:
    from extremis.bars import SafeConsole

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
    def rich(self) -> "SafeConsole":
        """The same stream for bars, tables and styles."""
        from extremis.bars import SafeConsole

        return SafeConsole(self.clean, stderr=self._name == "stderr", width=self._width)

    def print(self, text: Any, end: str = "\n", style: str | None = None) -> None:
        """Print a text, or an object that rich renders. Raises StorageError, ClosedPipe."""
        clear_spinner()
        if not isinstance(text, str) or (style is not None and self.is_terminal):
            self.rich.print(text, end=end, style=style)
        elif self.file is not None:
            self.file.write(self.clean(text).translate(_NOT_SHOWN) + end)
            self.file.flush()

    def clean(self, text: str) -> str:
        """Return a text without credentials and control characters."""
        return without_controls(redact(text)) if self.is_terminal else redact(text)


class _Messages(_Channel):
    """Channel for messages; if a message cannot be written, it is dropped without an error."""

    def print(self, text: Any, end: str = "\n", style: str | None = None) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed file
            super().print(text, end, style)


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


_BAR_SECONDS = 30.0  # between two lines of a bar without a terminal
_PIPED_WIDTH = 200  # characters per line of a table without a terminal


@dataclass(frozen=True)
class Event:
    """A line of progress. Events of a progress bar have a `title`, the number `done`, and the `total` if known."""

    text: str
    title: str = ""
    done: int | None = None
    total: int | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Output:
    """Destinations of output: progress goes to `listener`, else to standard error unless `quiet`; results to `results`.

    `verbose`: lines of progress begin with the seconds since the start. `command`: the running command line. `log`:
    receives every line of progress. `log_only`: only `log` receives lines, except lines of progress bars. `remaining`:
    describes the command's remaining time, given the finished fraction of the current phase.
    """

    listener: Callable[[Event], object] | None = None
    quiet: bool = False
    verbose: bool = False
    results: Literal["stdout", "stderr", "nowhere"] = "stdout"
    command: str = ""
    log: Callable[[str], object] | None = None
    log_only: bool = False
    remaining: Callable[[float], str] | None = None


class _Results(_Channel):
    """Print results to the current output."""

    def print(self, text: Any, end: str = "\n", style: str | None = None) -> None:
        if _output.results == "stdout":
            with contextlib.suppress(ClosedPipe):  # does not change the work and its exit status
                super().print(text, end, style)
        elif _output.results == "stderr" and not _output.quiet:
            messages.print(text, end, style)


# Messages go to standard error, results to standard output.
_width_is_known = os.isatty(1) or "COLUMNS" in os.environ  # streams of a daemon may be None or closed
_width = None if _width_is_known else _PIPED_WIDTH
messages, results = _Messages("stderr", None if os.isatty(2) else _width), _Results("stdout", _width)
_output = Output()
_began = time.monotonic()


@contextlib.contextmanager
def output(**changes: Any) -> Iterator[None]:
    """Change fields of the current `Output`, in all threads, until the block ends."""
    global _output
    before, _output = _output, replace(_output, **changes)
    try:
        yield
    finally:
        _output = before


def current_output() -> Output:
    """Return the current output."""
    return _output


def show_spinner(title: str) -> contextlib.AbstractContextManager[None]:
    """Show on rank 0 that `title` is running, until the block ends; not if output is quiet or goes to a listener."""
    if _output.quiet or _output.listener is not None or os.environ.get("RANK", "0") != "0":
        return contextlib.nullcontext()
    return run_spinner(
        title, messages.is_terminal, messages.print, lambda: _output.remaining(0.0) if _output.remaining else ""
    )


def say(message: str) -> None:
    """Print one line of progress."""
    _emit(Event(redact(message)))


# One rank of each machine reports waits; a library does not.
add_listener(lambda line: say(line) if _output.command and os.environ.get("LOCAL_RANK", "0") == "0" else None)


def say_without_bars(message: str) -> None:
    """Print one line of progress, without progress bars: another process may display its own."""
    say(message)


def _emit(event: Event, keep: bool = True) -> None:
    if keep and _output.log is not None:
        _output.log(event.text)
    if _output.log_only and not _output.verbose and not event.title:
        return
    if _output.listener is not None:
        _output.listener(event)
    elif not _output.quiet:
        seconds = f"{time.monotonic() - _began:7.1f} s  " if _output.verbose else ""
        messages.print(f"{seconds}{event.text}")


def print_json(body: Mapping[str, Any]) -> None:
    """Print the JSON object at the end of a command with `--json`."""
    _Channel.print(results, json.dumps(body))


def print_file(path: str) -> None:
    """Copy a file to standard output; on a terminal, replace control characters."""
    clear_spinner()
    with open(path, "rb") as file:
        if sys.stdout.isatty():
            for line in file:
                sys.stdout.buffer.write(without_controls(line.decode(errors="replace")).encode())
        else:
            shutil.copyfileobj(file, sys.stdout.buffer)
    sys.stdout.buffer.flush()


class Bar:
    """A progress bar on a terminal, else a plain line every _BAR_SECONDS. `total`: None if not known yet.

    `quiet`: print nothing. Use as a context manager.
    """

    def __init__(self, title: str, total: int | None, quiet: bool = False) -> None:
        self._title, self._total, self._quiet = title, total, quiet or _output.quiet
        self._done = 0
        self._next = time.monotonic() + _BAR_SECONDS
        self._progress: Any = None
        if not self._quiet and _output.listener is None and messages.is_terminal:
            from extremis.bars import make_bars

            self._progress = make_bars(messages.rich, counted=True)
            self._task = self._progress.add_task(messages.clean(title), total=total, note="")

    def __enter__(self) -> "Bar":
        self._shown = contextlib.ExitStack()
        self._shown.enter_context(hidden_spinner())
        if self._progress is not None:
            self._shown.enter_context(self._progress)
        return self

    def __exit__(self, *exc: object) -> None:
        self._shown.close()

    def update(self, done: int, note: str = "", total: int | None = None) -> None:
        """Show `done` of the total. `total`: the new total, if it has changed."""
        self._total = self._total if total is None else total
        if _output.remaining is not None and self._total and (left := _output.remaining(done / self._total)):
            note = f"{note}  in all {left}".strip()
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=self._total, note=messages.clean(note))
        elif self._quiet:
            return
        elif (is_due := time.monotonic() >= self._next) or _output.listener is not None:
            self._next = time.monotonic() + _BAR_SECONDS if is_due else self._next
            text = f"{self._title}: {say_count(done, self._total)} {note}"
            _emit(Event(text.rstrip(), self._title, done, self._total), keep=is_due)

    def advance(self, more: int) -> None:
        """Add `more` to the number done."""
        self._done += more
        self.update(self._done)


class StepBars:
    """Progress of a pipeline: a bar per step on a terminal, events for a listener, otherwise no output.

    A context manager that yields a function. Call the function with the steps that have begun
    (`pipelines.progress.StepProgress`). It shows these steps, and returns whether they were shown.
    """

    def __enter__(self) -> Callable[[Sequence[Any]], bool]:
        self._shown = contextlib.ExitStack()
        self._tasks: dict[str, Any] = {}
        self._listened = _output.listener is not None
        self._on_terminal = messages.is_terminal and not self._listened and not _output.quiet
        if not self._on_terminal:
            self._shown.enter_context(hidden_spinner())
        return self._show

    def __exit__(self, *exc: object) -> None:
        self._shown.close()

    def _show(self, steps: Sequence[Any]) -> bool:
        if self._listened:
            for step in steps:
                if not step.is_finished or step.name not in self._tasks:
                    self._tasks[step.name] = None
                    _emit(Event(str(step), step.name, step.rows, step.total))
        elif self._on_terminal and steps:
            if not self._tasks:  # the bars replace the spinner
                from extremis.bars import make_bars

                self._progress = make_bars(messages.rich, counted=False)
                self._shown.enter_context(hidden_spinner())
                self._shown.enter_context(self._progress)
            for step in steps:
                name, note = messages.clean(step.name), messages.clean(step.state)
                if step.name not in self._tasks:
                    self._tasks[step.name] = self._progress.add_task(name, total=step.total, note=note)
                self._progress.update(self._tasks[step.name], completed=step.rows, total=step.total, note=note)
        return self._listened or self._on_terminal


say.display = StepBars  # type: ignore[attr-defined]  # pipelines that get `say` show their steps with it


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is left-aligned, the others right-aligned, and no number is truncated."""
    from extremis.bars import make_table

    results.print(make_table(title, columns, rows))


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
    """Return (columns, rows) with P, nDCG, R, PSP and PSnDCG per k, and half the width of each 95 % interval."""
    families: dict[str, dict[int, str]] = {}
    for name in report["metrics"]:
        family, k = name.split("@")
        families.setdefault(family, {})[int(k)] = format_metric(report, name)
    ks = sorted({k for by_k in families.values() for k in by_k})
    rows = [[family, *(by_k.get(k, "") for k in ks)] for family, by_k in families.items()]
    return ["%", *(f"@{k}" for k in ks)], rows
