"""Lines about the progress of a pipeline."""

from collections.abc import Callable

Progress = Callable[[str], None]


def silent(line: str) -> None:
    """Ignore the line."""


def say_use(use_from: int | None) -> str:
    """Return the end of a line that names the first epoch to train on a table."""
    return "" if use_from is None else f", for use from epoch {use_from}"
