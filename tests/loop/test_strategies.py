"""The recipes of ASTRA's Table 5 through the whole loop: which tables they mine, and how many negatives they use."""

import json
from pathlib import Path

import pytest

from schemas.manifest import open_manifest
from tests.command import extremis, sets
from tests.recipes import RECIPES

CHOICES = sets("order.batch=128", "train.epochs=4", "logging.tensorboard=false")
TABLES = sets("refresh.every=1", "refresh.stale=wait")


@pytest.mark.parametrize(
    ("recipe", "by"),
    [
        pytest.param("theta-hard", "labels", marks=pytest.mark.slow),
        pytest.param("in-trainer", None, marks=pytest.mark.slow),
        pytest.param("random-theta-hard", "labels", marks=pytest.mark.slow),
        pytest.param("theta-curriculum", "labels", marks=pytest.mark.slow),
        pytest.param("curriculum", "classifier", marks=pytest.mark.slow),
        pytest.param("w-hard", "classifier", marks=pytest.mark.slow),
    ],
)
def test_a_strategy_from_end_to_end(data: Path, tmp_path: Path, recipe: str, by: str | None) -> None:
    run = tmp_path / "run"
    report = extremis("run", RECIPES[recipe], data, run, *CHOICES, *(TABLES if by else ()), "--json").json
    assert report["epochs"][-1]["loss"] < report["epochs"][0]["loss"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    stale = [record for record in records if record["kind"] == "staleness"]
    if by is None:
        assert set(report["table_versions"].values()) == {None}
        assert not (run / "dumps").exists()
        assert not stale
        return
    assert report["table_versions"] == {"0": None, "1": None, "2": 2, "3": 3}
    for epoch in (2, 3):
        for source in ("queries", "labels"):
            manifest = open_manifest(str(run / "negatives" / f"epoch-{epoch:04d}" / source), "negatives")
            assert manifest.parameters["by"] == by
    assert [record["age"] for record in stale] == [2, 2]
    assert [record["overlap"] is not None for record in stale] == [False, True]
    assert all(("score_drop" in record) == (by == "classifier") for record in stale)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ngame", "tas"])
def test_clusters_from_end_to_end(data: Path, tmp_path: Path, recipe: str) -> None:
    """NGAME's module M1 with clustering beside it: every refresh is used, and the model is one to be evaluated."""
    run = tmp_path / "run"
    tiny = (
        "encoder.dimension=16",
        "encoder.buckets=512",
        "order.batch=64",
        "order.cluster=4",
        "order.cluster_doubles_every=2",
        "refresh.stale=wait",
        "train.epochs=5",
        "train.threads=1",
        "logging.tensorboard=false",
        *(() if recipe == "tas" else ("refresh.every=2",)),
    )
    report = extremis(
        "run", RECIPES[recipe], data, run, *(word for setting in tiny for word in ("--set", setting)), "--json"
    ).json
    assert report["epochs"][1]["loss"] < report["epochs"][0]["loss"]
    last = 2 if recipe == "tas" else 4
    assert report["table_versions"] == {"0": None, "1": None, "2": 2, "3": 2, "4": last}
    table = open_manifest(str(run / "clusters" / f"epoch-{last:04d}" / "queries"), "queries")
    assert table.parents["queries"] == open_manifest(str(data / "queries" / "train")).digest
    assert table.parameters["clusters"]["size"] == 16
    assert ("order" in table.parents) == (recipe != "tas")  # made of what was in cluster order already
    assert extremis("evaluate", data, run, "--json").json["metrics"]["P@1"] > 0
    assert "already clustered" in extremis("cluster", data, run).err
