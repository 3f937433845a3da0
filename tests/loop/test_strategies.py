"""The recipes of ASTRA's Table 5 through the whole loop: which tables they mine, and how many negatives they use."""

import json
from pathlib import Path

import pytest

from schemas.manifest import open_manifest
from tests.command import extremis, sets

CHOICES = sets(
    "order.batch=128", "train.epochs=4", "refresh.every=1", "refresh.stale=wait", "logging.tensorboard=false"
)


@pytest.mark.parametrize(
    ("recipe", "by"),
    [
        pytest.param("theta-hard", "labels", marks=pytest.mark.slow),
        pytest.param("in-trainer", None, marks=pytest.mark.slow),
        pytest.param("random+theta-hard", "labels", marks=pytest.mark.slow),
        pytest.param("theta-curriculum", "labels", marks=pytest.mark.slow),
        pytest.param("curriculum", "classifier", marks=pytest.mark.slow),
        pytest.param("w-hard", "classifier", marks=pytest.mark.slow),
    ],
)
def test_a_strategy_from_end_to_end(data: Path, tmp_path: Path, recipe: str, by: str | None) -> None:
    run = tmp_path / "run"
    found = extremis("run", recipe, data, run, *CHOICES, "--json").json
    assert found["epochs"][-1]["loss"] < found["epochs"][0]["loss"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    stale = [record for record in records if record["kind"] == "staleness"]
    if by is None:
        assert set(found["table_versions"].values()) == {None}
        assert not (run / "dumps").exists()
        assert not stale
        return
    assert found["table_versions"] == {"0": None, "1": None, "2": 2, "3": 3}
    for epoch in (2, 3):
        for source in ("queries", "labels"):
            manifest = open_manifest(str(run / "negatives" / f"epoch-{epoch:04d}" / source), "negatives")
            assert manifest.parameters["by"] == by
    assert [record["age"] for record in stale] == [2, 2]
    assert [record["overlap"] is not None for record in stale] == [False, True]
    assert all(("score_drop" in record) == (by == "classifier") for record in stale)
