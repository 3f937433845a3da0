"""Fixtures of the hostile suite: one loop, undisturbed, whose results tests copy and damage."""

from pathlib import Path
from typing import Any

import pytest

from tests.hostile.loop import make


@pytest.fixture(scope="session")
def loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder with `raw`, `data`, `run`, `vectors` and `export`, and what `evaluate` said."""
    folder = tmp_path_factory.mktemp("loop") / "local"
    folder.mkdir()
    return folder, make(folder)
