"""What this process is doing, as its heartbeats and its metrics show it: facts of its work, and what it waits for."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from schemas.waits import oldest_wait

Facts = Callable[[], Mapping[str, Any]]  # numbers and texts by name; any thread may call it
_facts: list[Facts] = []


@contextlib.contextmanager
def showing(facts: Facts) -> Iterator[None]:
    """Show `facts` as part of this process's state until the block ends; of two with one name, the later one counts."""
    _facts.append(facts)
    try:
        yield
    finally:
        _facts.remove(facts)


def state() -> dict[str, Any]:
    """Return all facts, and, while this process waits, `waits_for` and `waits_since` (seconds since 1970)."""
    shown = {name: value for each in tuple(_facts) for name, value in each().items() if value is not None}
    if (wait := oldest_wait()) is not None:
        shown["waits_for"], shown["waits_since"] = wait
    return shown
