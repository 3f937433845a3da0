"""Who is told how far a pipeline is."""

from collections.abc import Callable

Progress = Callable[[str], None]


def silent(line: str) -> None:
    """Tell nobody."""
