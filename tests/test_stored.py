"""What a release stored in format 2 is read by this code, with the same answers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import extremis
from schemas.layout import RunLayout
from schemas.manifest import KINDS
from schemas.table import Table
from tests.days import TINY
from tests.stored import STORED, read, rows
from trainer.checkpoints import latest_checkpoint


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """A copy of the artifacts, as the current folder; what the release read."""
    shutil.copytree(STORED, tmp_path / "stored")
    monkeypatch.chdir(tmp_path / "stored")
    return json.loads(Path("read.json").read_text())


def test_what_a_release_stored_is_read_with_the_same_answers(stored: dict) -> None:
    assert {kind for kind, _, _ in stored["tables"].values()} == set(KINDS)
    found = read()
    for name, expected in stored.items():
        exact = name in ("tables", "labels")
        assert found[name] == (expected if exact else pytest.approx(expected, rel=1e-3)), name


def test_a_run_that_a_release_began_is_resumed_to_its_end(stored: dict) -> None:
    newest = latest_checkpoint(RunLayout("run"))
    expected = newest.vectors("weight").float().numpy()
    shutil.rmtree(newest.table.url)
    Path("run/finished.json").unlink()
    extremis.train("run/config.toml", "data/1", "run", resume=True, progress=False)
    resumed = latest_checkpoint(RunLayout("run"))
    assert resumed.table.url == newest.table.url
    np.testing.assert_allclose(resumed.vectors("weight").float().numpy(), expected, atol=1e-4)


def test_a_version_and_a_run_go_on_from_those_of_a_release(stored: dict) -> None:
    extremis.shard({"train": rows(120, 130)}, "data/3", onto="data/2", propensity=(0.55, 1.5), progress=False)
    assert Table.open("data/3/queries/train").rows == Table.open("data/2/queries/train").rows + 10
    extremis.train("random", "data/3", "later", from_run="run", set=TINY | {"encoder.buckets": 32}, progress=False)
    assert latest_checkpoint(RunLayout("later"))
