"""What several tests share: small data, made once by the real `extremis shard`."""

from pathlib import Path

import pytest
from hypothesis import settings

from tests.command import extremis
from tests.pipelines.raw import write_tate

# How long an example takes says nothing here: first calls load libraries, and machines are shared.
settings.register_profile("extremis", deadline=None)
settings.load_profile("extremis")


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first lines of Tate as raw files."""
    return write_tate(tmp_path_factory.mktemp("raw") / "tate", 1500, 200)


@pytest.fixture(scope="session")
def data(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished DATA. Tests leave it as it is."""
    out = tmp_path_factory.mktemp("sharded") / "data"
    extremis("shard", raw, out, "--tokenizer", "train:1000", "--row-group-rows", "64", "--propensity", "0.55,1.5")
    return out
