"""Fixtures of tests of commands."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions, a run on the first, and one on the second that goes on from it; tests do not change these."""
    from tests.days import make_versions_and_runs  # much more than tests of a GPU need

    return make_versions_and_runs(tmp_path_factory.mktemp("days"))
