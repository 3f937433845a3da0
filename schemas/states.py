"""What this process is doing, as its heartbeats and its metrics show it: facts of its work, and what it waits for."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from schemas.waits import oldest_wait

_facts: list[Callable[[], Mapping[str, Any]]] = []


@contextlib.contextmanager
def showing(facts: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Show numbers and texts as part of this process's state until the block ends. Any thread calls `facts`."""
    _facts.append(facts)
    try:
        yield
    finally:
        _facts.remove(facts)


def state() -> dict[str, Any]:
    """Return all facts, and, while this process waits, `waits_for` and `waits_since` (seconds since 1970)."""
    shown: dict[str, Any] = {}
    for facts in tuple(_facts):
        with contextlib.suppress(Exception):  # what is shown must not end a heartbeat
            shown |= {name: value for name, value in facts().items() if value is not None}
    return shown | oldest_wait()
