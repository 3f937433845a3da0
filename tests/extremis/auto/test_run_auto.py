"""`extremis run auto` by the command line, on data that trains in a moment: what it leaves, resumes and refuses."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from extremis.reporting.page import explain_choice
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.storage import read_json
from tests.bert import write_bert
from tests.command import Done, call, refused
from tests.owners import held_elsewhere
from tests.pipelines.raw import write_tiny
from tests.processes import wait_until_gone
from trainer.evaluation.evaluate import HOLDOUT, open_split
from trainer.methods.settling import NOMINAL, settle
from trainer.recipe_files import load_config, load_recipe, read_recipe, validate

SHARD = ("--tokenizer", "train:300", "--shards", "2", "--row-group-rows", "8", "--propensity", "0.55,1.5")
SMALL = ("encoder.dimension=8", "train.epochs=2", "logging.tensorboard=false", "checkpoint.every_epochs=1")
OVERRIDES = [word for override in SMALL for word in ("--set", override)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("auto")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    done = call("shard", write_tiny(folder / "raw", rows=60, labels=20), folder / "data", *SHARD)
    assert done.status == 0, done.err
    return folder / "data"


@pytest.fixture(scope="module")
def ran(folder: Path, data: Path) -> Done:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    done = call("run", "auto", data, folder / "run", *OVERRIDES, "--minutes", "20", "--json")
    torch.set_num_threads(threads)
    assert done.status == 0, done.err
    return done


@pytest.fixture(scope="module")
def run(folder: Path, ran: Done) -> Path:
    return folder / "run"


def test_a_run_that_another_process_makes_is_left_to_it(data: Path, tmp_path: Path) -> None:
    with held_elsewhere(str(tmp_path / "run"), "trained"):
        refused(
            call("run", "auto", data, tmp_path / "run", *OVERRIDES),
            "being trained by process",
            "Wait until that process has finished",
            status=5,
        )


def report_of(run: Path) -> dict[str, Any]:
    return read_json(str(run / "auto.json"))


def test_it_says_what_it_saw_and_keeps_what_it_chose(ran: Done, run: Path) -> None:
    assert "60 queries of " in ran.err
    assert "100% of the labels have a text" in ran.err
    report, body = report_of(run), ran.json
    recipes = [trial["recipe"] for trial in report["trials"]]
    assert {"renee", "decoupled", "dexml-sampled"} == set(recipes)  # few labels: every one is scored
    best = max((trial for trial in report["trials"] if "ended" not in trial), key=lambda trial: trial["nDCG@5"])
    first, second = report["finalists"]
    assert (first["recipe"], first["changes"]) == (best["recipe"], best["changes"])
    assert {"recipe": report["chosen"], "changes": report["changes"]} in (first, second)
    assert "encoder.dropout=0.3" in second["changes"]
    assert report["compared"] in ran.err
    assert f"{first['recipe']} with {', '.join(first['changes'])}: nDCG@5" in explain_choice(report)
    assert report["compared"] in explain_choice(report)
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == ["adoptions", "checkpoints", "fusion"]
    variations = [trial["changes"][-1] for trial in report["trials"] if "ngram_weight" in str(trial["changes"])]
    assert len(variations) == len({*variations}) >= 2
    assert recipes.count(report["chosen"]) == 1 + len(variations)
    assert {name: body[name] for name in report} == report
    assert [epoch["epoch"] for epoch in body["epochs"]] == [0, 1]
    assert all("P@1" in epoch["validation"] for epoch in body["epochs"])
    assert body["fusion"]["split"] == HOLDOUT
    assert "extremis evaluate" in ran.err


def test_the_recipe_in_run_is_an_ordinary_one_and_that_of_the_run(data: Path, run: Path, tmp_path: Path) -> None:
    path = str(run / "recipe.toml")
    recipe = load_recipe(path)
    assert settle(read_recipe(path), NOMINAL)[1] == {}
    config = load_config(str(run / "config.toml"))["recipe"]
    assert recipe == validate(config, str(run))
    assert recipe.model_dump(mode="json") == config
    assert (recipe.encoder.dimension, recipe.train.epochs, recipe.data.holdout) == (8, 2, 0.1)
    assert recipe.name == report_of(run)["chosen"]
    assert 0 < recipe.train.minutes < 20  # without the time that the trials took
    changes = ("--set", "train.minutes=0", "--set", "train.epochs=1", "--json")
    done = call("train", path, data, tmp_path / "again", *changes)
    assert done.status == 0, done.err
    assert len(done.json["epochs"]) == 1


def test_a_finished_run_is_scored_fused_and_exported(data: Path, run: Path, tmp_path: Path) -> None:
    for scores in ("classifier", "fused"):
        done = call("evaluate", data, run, "--scores", scores, "--json")
        assert (done.status, done.json["queries"]) == (0, 30)
    assert call("evaluate", data, run, "--split", HOLDOUT, "--json").json["queries"] == 8  # about a tenth of 60
    assert call("export", data, run, tmp_path / "out", "--scores", "fused").status == 0
    assert call("predict", tmp_path / "out", tmp_path / "p.jsonl", "--data", data).status == 0


def test_what_is_held_out_is_the_same_in_trials_and_run(data: Path, run: Path) -> None:
    recipe = load_recipe(str(run / "recipe.toml"))
    table, part = open_split(DataLayout(str(data)), HOLDOUT, recipe.data)
    assert sum(rows.num_rows for rows in part.batches(table, ["query_id"])) == 8


def test_wrong_use_is_refused(data: Path, run: Path, tmp_path: Path) -> None:
    before = (run / "auto.json").read_bytes()
    refused(call("run", "auto", data, run, *OVERRIDES), str(run), "a run exists here already", "--resume")
    assert (run / "auto.json").read_bytes() == before
    refused(call("run", "astra", data, tmp_path / "r", "--minutes", "3"), "--minutes works only with", "train.minutes=")
    refused(call("run", "auto", data, tmp_path / "r", "--minutes", "0"), "--minutes", "0")
    refused(call("run", "astra", data, tmp_path / "r", "--pretrained", "m"), "--set encoder.pretrained=MODEL")
    write_bert(tmp_path / "bert", 40)
    Tokenizer(WordLevel({"a": 0, "ship": 1})).save(str(tmp_path / "bert" / "tokenizer.json"))
    wrong = call("run", "auto", data, tmp_path / "r", "--pretrained", tmp_path / "bert")
    refused(wrong, "have the same id in the model", f"--tokenizer {tmp_path / 'bert'}")
    refused(call("run", "auto", tmp_path / "nowhere", tmp_path / "r"), "nowhere")
    refused(call("run", "auto", data, tmp_path / "r", "--set", "encoder.dimensions=3"), "did you mean 'dimension'")
    assert not (tmp_path / "r").exists()  # before any trial


def test_a_run_of_another_recipe_is_not_resumed(data: Path, run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / "run")
    (other / "auto.json").unlink()
    refused(call("run", "auto", data, other, *OVERRIDES, "--resume"), str(other), "not started by auto", "another RUN")


def test_several_ranks_are_refused_before_anything_is_made(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(call("run", "auto", data, tmp_path / "run", *OVERRIDES), "one process", "2 processes", "recipe.toml")
    assert not (tmp_path / "run").exists()


def test_resume_of_a_finished_run_trains_nothing_more(data: Path, ran: Done, run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for kind in ("fusion", "checkpoints") for path in (run / kind).rglob("*")}
    before[run / "recipe.toml"] = (run / "recipe.toml").stat().st_mtime_ns
    (run / "trials").mkdir()  # as after a kill at the very end
    done = call("run", "auto", data, run, *OVERRIDES, "--resume", "--json")
    assert done.status == 0, done.err
    assert [done.json[name] for name in ("chosen", "fusion")] == [ran.json[name] for name in ("chosen", "fusion")]
    assert done.json["epochs"] == []
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not (run / "trials").exists()


def test_training_goes_on_with_the_recipe_that_was_chosen(data: Path, run: Path, tmp_path: Path) -> None:
    """As after a kill before its first checkpoint; tests/loop has real ones, and later ones."""
    cut = tmp_path / "cut"
    shutil.copytree(run, cut)
    shutil.rmtree(max((cut / "checkpoints").iterdir()))
    shutil.rmtree(cut / "fusion")
    (cut / "finished.json").unlink()
    refused(call("run", "auto", data, cut, *OVERRIDES), "a run exists here already")
    done = call("run", "auto", data, cut, *OVERRIDES, "--resume", "--json")
    assert done.status == 0, done.err
    assert [epoch["epoch"] for epoch in done.json["epochs"]] == [0, 1]
    assert len([*(cut / "checkpoints").iterdir()]) == 1  # the one that serves
    assert (cut / "recipe.toml").read_bytes() == (run / "recipe.toml").read_bytes()
    assert "trials on a part" not in done.out
    newest = [open_manifest(str(max((each / "checkpoints").iterdir()))) for each in (run, cut)]
    assert newest[0].shards == newest[1].shards
    assert done.json["fusion"]["split"] == HOLDOUT


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["trials/*/finished.json", "finalists/1/finished.json", "finalists/2/config.toml"])
@pytest.mark.parametrize("threads", ["1", "2"])  # in a row, and side by side
def test_it_goes_on_after_a_kill(data: Path, ran: Done, folder: Path, seen: str, threads: str) -> None:
    run = folder / f"killed-{seen.replace('/', '-')}-{threads}"
    command, env = (
        [sys.executable, "-m", "extremis", "run", "auto", data, run, *OVERRIDES],
        {"OMP_NUM_THREADS": threads},
    )
    process = subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until and not [*run.glob(seen)]:
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    wait_until_gone(process.pid)
    left = sorted(path.name for path in run.iterdir())
    assert {name for name in left if not name.startswith(".")} <= {"run.log", "trials", "finalists"}
    done = call("run", "auto", data, run, *OVERRIDES, "--resume", "--json")
    assert done.status == 0, done.err
    assert {**report_of(run), "crc32": 0} == {**report_of(folder / "run"), "crc32": 0}  # as without a kill
    newest = [open_manifest(str(max((each / "checkpoints").iterdir()))) for each in (folder / "run", run)]
    assert newest[0].shards == newest[1].shards
    assert not (run / "finalists").exists()
