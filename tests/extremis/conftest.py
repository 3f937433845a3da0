"""Fixtures of tests of commands."""

from pathlib import Path

import pytest

from tests.days import live


@pytest.fixture(scope="session")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions, a run on the first, and one on the second that goes on from it; tests do not change these."""
    return live(tmp_path_factory.mktemp("days"))
