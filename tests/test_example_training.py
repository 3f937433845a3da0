"""Trainings of one's own over the stream, as the files of examples/ have them, by whatever does the loop."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import open_manifest, unpublish
from tests.builders import write_negatives
from tests.command import ROOT, environment
from tests.example_training import Training, train
from tests.laws import assert_equal, assert_every_row_once
from trainer.stream import JoinedStream, open_sources

NEEDS = {"own_loop": (), "hf_trainer": ("accelerate",), "lightning_module": ("lightning", "torchdata")}
EPOCHS = 3
MIDDLE = 30  # steps, of 72


def needed(example: str) -> str:
    for name in NEEDS[example]:
        pytest.importorskip(name, reason=f"examples/{example}.py needs {name}, of the extra `test`")
    return example


@pytest.fixture(params=NEEDS)
def example(request: pytest.FixtureRequest) -> str:
    return needed(request.param)


@pytest.fixture(params=["hf_trainer", "lightning_module"])
def other(request: pytest.FixtureRequest) -> str:
    """An example whose loop is not its own."""
    return needed(request.param)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def tables() -> dict[int, np.ndarray]:
    """Return the label ids [N, K] of a run's tables by their epochs."""
    return {}


@pytest.fixture(scope="module")
def run(data: Path, tables: dict[int, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with tables for epochs 2 and 4, and an unfinished one for epoch 6."""
    root = tmp_path_factory.mktemp("run")
    run, layout = RunLayout(str(root)), DataLayout(str(data))
    queries, labels = open_manifest(layout.queries("train")), open_manifest(layout.labels).rows
    Path(run.config).touch()
    for epoch in (2, 4, 6):
        tables[epoch] = np.random.default_rng(epoch).integers(0, labels, (queries.rows, 12))
        write_negatives(run.negatives(epoch, "queries"), queries, tables[epoch], labels)
    unpublish(run.negatives(6, "queries"))
    return root


@pytest.fixture(scope="module")
def own(data: Path, run: Path) -> Training:
    """Return the training of examples/own_loop.py."""
    return train("own_loop", data, run)


def test_each_row_comes_once_an_epoch_with_the_newest_finished_table_of_the_run(
    own: Training, tables: dict[int, np.ndarray]
) -> None:
    for epoch in range(EPOCHS):
        rows = [batch.rows for batch in own.batches if batch.epoch == epoch]
        assert_every_row_once(rows, len(tables[4]))
    assert {batch.epoch for batch in own.batches} == set(range(EPOCHS))
    for batch in own.batches:
        np.testing.assert_array_equal(batch.hard, tables[4][batch.rows])


def test_another_loop_is_given_the_same_batches_and_ends_with_the_same_weights(
    other: str, data: Path, run: Path, own: Training
) -> None:
    training = train(other, data, run)
    assert len(training.batches) == len(own.batches)
    for got, expected in zip(training.batches, own.batches, strict=True):
        assert_equal(got, expected)
    same_weights(training, own)


def test_what_stops_within_an_epoch_goes_on_as_if_it_had_not(other: str, data: Path) -> None:
    whole = train(other, data, **saving(other))
    resumed = train(other, data, seed=1, resume=f"saved/checkpoint-{MIDDLE}")
    assert (resumed.batches[-1].epoch, resumed.batches[-1].step) == (2, 23)
    same_weights(resumed, whole)


def saving(example: str) -> dict:
    """Changes that save a checkpoint every few steps, in a folder `saved`."""
    if example == "hf_trainer":
        return {"save_strategy": "steps", "save_steps": MIDDLE // 3, "output_dir": "saved"}
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Callback(ModelCheckpoint):
        FILE_EXTENSION = ""

    name = {"filename": "checkpoint-{step}", "auto_insert_metric_name": False}
    return {
        "enable_checkpointing": True,
        "callbacks": [Callback("saved", save_top_k=-1, every_n_train_steps=MIDDLE // 3, **name)],
    }


def same_weights(training: Training, expected: Training) -> None:
    """Check that the weights are the same but for the order in which an optimizer adds."""
    for got, weights in zip(training.weights, expected.weights, strict=True):
        np.testing.assert_allclose(got, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", ["nowhere", "run without a table"])
def test_an_error_is_one_line(
    place: str, example: str, data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    arguments = ["nowhere"] if place == "nowhere" else [str(data), "empty"]
    Path("empty").mkdir()
    Path("empty", "config.toml").touch()
    file = str(ROOT / "examples" / f"{example}.py")
    monkeypatch.setattr(sys, "argv", [file, *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(file, run_name="__main__")
    assert end.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {arguments[-1]}")


def test_one_process_for_several_gpus_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed("hf_trainer")
    monkeypatch.setattr("transformers.TrainingArguments.n_gpu", property(lambda _: 2))
    with pytest.raises(InputError, match="torchrun --nproc-per-node=2"):
        train("hf_trainer", data)


@pytest.mark.slow
def test_two_ranks_are_given_the_global_batches_and_agree(other: str, data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0"]
    done = subprocess.run(
        [*command, "-m", "tests.example_training", other, data, tmp_path],
        env=environment({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    layout = DataLayout(str(data))
    labels = open_manifest(layout.labels).rows
    whole = JoinedStream(open_sources(layout, "train", False), labels, batch=64, streams=8, tail="drop")
    expected = []
    for epoch in range(EPOCHS):
        whole.set_epoch(epoch)
        expected += [[epoch, batch.step, batch.rows.tolist()] for batch in whole]
    dealt = [
        [epoch, step, first + second]
        for (epoch, step, first), (*_, second) in zip(ranks[0]["batches"], ranks[1]["batches"], strict=True)
    ]
    assert dealt == expected
