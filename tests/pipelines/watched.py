"""Runs beside which a watcher works."""

from collections.abc import Iterator
from typing import Any

import pytest

from pipelines import dumps
from schemas import storage
from schemas.layout import RunLayout
from schemas.waits import Wait


def finish_at_second_look(patch: pytest.MonkeyPatch, run: str) -> None:
    """Have the next watcher of `run` find it finished when it has waited once, and soon."""
    finished, waiting = RunLayout(run).finished, dumps.waiting

    def soon(*what: Any, **options: Any) -> Iterator[Wait]:
        storage.remove(finished)
        for number, wait in enumerate(waiting(*what, **options | {"every": 0.01})):
            if number == 1:
                storage.write_bytes(finished, b"{}")
            yield wait

    patch.setattr(dumps, "waiting", soon)
