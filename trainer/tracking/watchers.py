"""Watchers, which receive a run's numbers: each has a file here, and an entry in `trainer/methods/sections.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.secrets import redact
from schemas.waits import Say
from trainer.methods.kinds import import_name
from trainer.methods.sections import WATCHERS, Logging


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run for its watchers.

    `url`: the URL of the run; `folder`: a local folder for files, which persists unless `is_temporary`; `recipe`: the
    run's options by section; `say`: prints a line on the terminal.
    """

    url: str
    folder: Path
    is_temporary: bool
    recipe: Mapping[str, Any]
    say: Say

    @property
    def title(self) -> str:
        """Last component of the run's URL."""
        return redact(self.url).rstrip("/").rpartition("/")[2]


class Watcher:
    """A destination for a run's numbers, with its own library; created from `RunFacts` and the value of an option."""

    def start(self, step: int, identity: str | None) -> str | None:
        """Begin a run, or continue the run `identity` after global `step`; return the run's identity, if it has one.

        Raises InputError if the setup of the watcher fails.
        """

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the `numbers_of` a record, without waiting for a response."""

    def flush(self) -> None:
        """Write pending numbers to local files."""

    def close(self, finished: bool) -> None:
        """Send pending numbers, and whether the run reached its end."""


def open_watchers(options: Logging, facts: RunFacts) -> dict[str, Watcher]:
    """Open the watchers of `options`, keyed by option. Raises InputError if a library is not installed."""
    values = {option: getattr(options, option) for option in WATCHERS}
    return {option: import_name(WATCHERS[option])(facts, value) for option, value in values.items() if value}


def tag(kind: str, name: str) -> str:
    """Return the name of a number in watchers, which group names with the same first part."""
    if name.startswith("seconds_"):
        return f"time/{name.removeprefix('seconds_')}"
    if name.endswith("_lr"):
        return f"rate/{name.removesuffix('_lr')}"
    if kind in ("adoption", "epoch") and name.startswith("table_"):
        return f"table/{name.removeprefix('table_')}"
    return {"rows_per_second": "throughput/rows_per_second"}.get(name, f"{kind}/{name}")


def numbers_of(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record, keyed by `tag`."""
    return {
        tag(kind, name): value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
