"""What a person sees: progress bars on a terminal, plain lines elsewhere, tables, and one JSON object on request."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from schemas.secrets import redact


class _Discreet(Console):
    """Prints texts without the credentials that a URL in them may carry."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(redact(one) if isinstance(one, str) else one for one in objects), **options)


_PIPED = 200  # characters that a line of a table may have where no terminal says how many

# Messages go to standard error, results to standard output.
notes = _Discreet(stderr=True, highlight=False, soft_wrap=True)
_told = sys.stdout.isatty() or "COLUMNS" in os.environ
results = _Discreet(highlight=False, soft_wrap=True, width=None if _told else _PIPED)


def say(message: str) -> None:
    """One line for whoever watches."""
    notes.print(message, markup=False)


def print_json(body: Mapping[str, Any]) -> None:
    """The one JSON object that `--json` ends with."""
    sys.stdout.write(redact(json.dumps(body)) + "\n")
    sys.stdout.flush()


class Bar:
    """A progress bar on a terminal; elsewhere a plain line every `seconds`. `total` None: nobody knows yet.

    Nothing of it where it is `quiet`. Use as a context manager.
    """

    def __init__(self, what: str, total: int | None, seconds: float = 10.0, quiet: bool = False) -> None:
        self._what, self._total, self._seconds, self._quiet = what, total, seconds, quiet
        self._done = 0
        self._next = time.monotonic() + seconds
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=notes,
            disable=quiet or not notes.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(what, total=total, note="")

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def update(self, done: int, note: str = "", total: int | None = None) -> None:
        """`done` of the total are done now; a `total` given is what they are of from now on."""
        self._total = self._total if total is None else total
        self._progress.update(self._task, completed=done, total=self._total, note=note)
        if not self._quiet and not notes.is_terminal and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._seconds
            of = "" if self._total is None else f" of {self._total:,}"
            say(f"{self._what}: {done:,}{of} {note}".rstrip())

    def advance(self, more: int) -> None:
        """So many more of the total are done."""
        self._done += more
        self.update(self._done)

    def say(self, message: str) -> None:
        """A line that stays above the bar."""
        if not self._quiet:
            say(message)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is left-aligned, the others right-aligned. No figure is cut off."""
    grid = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        first = number == 0
        grid.add_column(column, justify="left" if first else "right", no_wrap=first, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    results.print(grid)


def metrics_table(title: str, report: Mapping[str, Any]) -> None:
    """P, nDCG, R, PSP and PSnDCG by k, with the half-width of the 95 % interval."""
    metrics, intervals = report["metrics"], report.get("intervals") or {}
    families: dict[str, dict[int, str]] = {}
    for name, value in metrics.items():
        family, k = name.split("@")
        low, high = intervals.get(name, (value, value))
        families.setdefault(family, {})[int(k)] = (
            f"{value:.2f} ±{(high - low) / 2:.2f}" if intervals else f"{value:.2f}"
        )
    ks = sorted({k for by_k in families.values() for k in by_k})
    table(
        title,
        ["%", *(f"@{k}" for k in ks)],
        [[family, *(by_k.get(k, "") for k in ks)] for family, by_k in families.items()],
    )


class Stopwatch:
    """Seconds of named stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, action: Callable[[], Any]) -> Any:
        """Run `action` and add its seconds to `name`."""
        start = time.perf_counter()
        try:
            return action()
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 2)
