"""`extremis run auto --from RUN1`: an update with the recipe of RUN1, without trials."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from schemas.layout import RunLayout
from tests.command import Done, call, refused
from tests.days import TINY
from tests.pipelines.test_versions import SEQUENCE, make
from trainer.recipe_files import load_config

SIZES = [word for name, value in TINY.items() for word in ("--set", f"{name}={str(value).lower()}")]


@pytest.fixture
def copied(days: Path, tmp_path: Path) -> Path:
    return shutil.copytree(days, tmp_path / "days")


def update(days: Path, data: str, run: str, earlier: str, *more: str) -> Done:
    return call("run", "auto", days / data, days / run, "--from", days / earlier, *more, "--json")


def recipe_of(run: Path) -> dict[str, Any]:
    return load_config(RunLayout(str(run)).config)["recipe"]


def test_updates_of_updates_have_the_settings_of_a_run_from_scratch_each_time(copied: Path) -> None:
    """Also when the runs before are gone: RUN/recipe.toml keeps the recipe."""
    first = recipe_of(copied / "run0")
    done = update(copied, "data1", "day1", "run0")
    assert done.status == 0, done.err
    assert f"continues {copied / 'run0'} with its recipe, random, without trials" in done.err
    assert f"{copied / 'run0'} has no fusion, so no fusion is fitted" in done.err
    assert call("train", "random", copied / "data1", copied / "other", "--from", copied / "run0", *SIZES).status == 0
    shutil.rmtree(copied / "run0")
    assert update(copied, "data2", "day2", "day1").status == 0
    for number in (1, 2):
        recipe = recipe_of(copied / f"day{number}")
        assert recipe["train"]["start_from"].endswith(("run0", "day1")[number - 1])
        assert recipe["encoder"]["lr"] == pytest.approx(first["encoder"]["lr"] / 2)
        assert recipe["encoder"]["dimension"] == TINY["encoder.dimension"]
        assert recipe["train"]["epochs"] <= TINY["train.epochs"]
        assert not any((copied / f"day{number}").glob("trials"))
    assert update(copied, "data2", "day2", "day1", "--resume").json["epochs"] == []
    refused(update(copied, "data2", "day3", "other"), str(copied / "run0"), "is gone with its recipe")
    assert not (copied / "day3").exists()


def test_a_fusion_that_cannot_be_fitted_again_is_kept(copied: Path) -> None:
    assert call("fuse", copied / "data1", copied / "run1", "--split", "train").status == 0
    done = update(copied, "data2", "day2", "run1")
    assert "is kept, because no rows are held out and there is no split val" in done.err
    assert "scores are fused with the weights of" in done.err
    assert call("evaluate", copied / "data2", copied / "day2", "--split", "train", "--json").json["scores"] == "fused"


def test_a_run_of_other_data_and_a_pretrained_model_are_refused(days: Path, tmp_path: Path) -> None:
    make(tmp_path, SEQUENCE[:1])
    wrong = call("run", "auto", tmp_path / "data0", tmp_path / "run", "--from", days / "run1")
    refused(wrong, "trained on different data", "or its earlier versions")
    more = ("--from", days / "run0", "--pretrained", "m")
    refused(call("run", "auto", days / "data1", tmp_path / "run", *more), "--pretrained is for trials")
    assert not (tmp_path / "run").exists()


def test_an_update_validates_on_its_own_newest_part(tmp_path: Path) -> None:
    """And not on the part that its recipe named when RUN1 was trained."""
    for day in (1, 2, 3):
        raw = tmp_path / f"raw{day}"
        raw.mkdir()
        rows = [{"key": f"{day}-{i}", "text": f"t{i % 7} u{i % 3}", "labels": [f"l{i % 5}"]} for i in range(60)]
        labels = [{"key": f"l{i}", "text": f"name {i}"} for i in range(5)]
        for name, part in (("train", rows[10:]), ("val", rows[:10]), ("labels", labels)):
            (raw / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        onto = ("--onto", tmp_path / f"data{day - 1}") if day > 1 else ("--tokenizer", "train:200")
        assert call("shard", raw, tmp_path / f"data{day}", "--part", f"2026-11-{day}", *onto).status == 0
    assert call("run", "random", tmp_path / "data1", tmp_path / "run1", *SIZES).status == 0
    assert call("fuse", tmp_path / "data1", tmp_path / "run1").status == 0
    for day in (2, 3):
        done = update(tmp_path, f"data{day}", f"run{day}", f"run{day - 1}")
        assert done.status == 0, done.err
        assert "is fitted again, with ranker and memory" in done.err
        assert done.json["fusion"]["split"] == "val"
        assert recipe_of(tmp_path / f"run{day}")["validation"]["parts"] == f"2026-11-{day}"
