"""Who is told how far a pipeline is, and in what words."""

from collections.abc import Callable

Progress = Callable[[str], None]


def silent(line: str) -> None:
    """Tell nobody."""


def say_use(use_from: int | None) -> str:
    """For the end of a line: the first epoch that trains on a table."""
    return "" if use_from is None else f", for use from epoch {use_from}"
