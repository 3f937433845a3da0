"""Fixtures of the hostile suite: one loop, undisturbed, whose results tests copy and damage."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Once
from tests.hostile.loop import make


@pytest.fixture(scope="session")
def loop(once: Once) -> tuple[Path, dict[str, Any]]:
    """Return the folder with `raw`, `data`, `run`, `vectors` and `export`, and what `evaluate` said."""
    folder = once("loop", make)
    return folder / "local", json.loads((folder / "said.json").read_text())
