"""Weights & Biases and MLflow, offline and through their own libraries: numbers, recipe, state, and a resumed run."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import InputError
from schemas.layout import RunLayout
from trainer.methods.sections import Logging
from trainer.tracking import Tracker, metric_name

RECIPE = {"train": {"epochs": 3}, "encoder": {"kind": "bag"}}


def track(run: RunLayout, resume_at: int, steps: range, options: Logging, finished: bool = False) -> list[str]:
    """Record a loss at each of `steps`, and P@1 at the last; return what was said."""
    said: list[str] = []
    tracker = Tracker(run, options, RECIPE, say=said.append)
    tracker.start(resume_at)
    for step in steps:
        tracker.record("train", step, {"loss": 1 / step, "epoch": 0, "device": "cpu", "late": False})
    tracker.record("validation", steps[-1], {"epoch": 0, "P@1": 40.0 + steps[-1]})
    tracker.close(finished)
    return said


class TestMLflow:
    @pytest.fixture
    def client(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        tracking = pytest.importorskip("mlflow.tracking", reason="the extra `mlflow` is not installed")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        return tracking.MlflowClient()

    @pytest.fixture
    def options(self) -> Logging:
        return Logging(tensorboard=False, mlflow="tate")

    def run_of(self, client: Any) -> Any:
        number = client.get_experiment_by_name("tate").experiment_id
        (run,) = client.search_runs([number])
        return run

    def test_it_has_numbers_recipe_and_state(self, client: Any, options: Logging, tmp_path: Path) -> None:
        said = track(RunLayout(str(tmp_path / "run")), 0, range(1, 4), options, finished=True)
        run = self.run_of(client)
        assert run.info.run_name == "run"
        assert run.info.status == "FINISHED"
        assert run.data.params == {"train.epochs": "3", "encoder.kind": "bag"}
        assert run.data.metrics.keys() == {"train/loss", "train/epoch", "validation/epoch", "validation/P_at_1"}
        history = client.get_metric_history(run.info.run_id, "train/loss")
        assert {point.step: point.value for point in history} == pytest.approx({1: 1, 2: 1 / 2, 3: 1 / 3})
        assert run.info.run_id in said[0]

    def test_a_resumed_run_is_the_same_run_and_has_each_step_once(
        self, client: Any, options: Logging, tmp_path: Path
    ) -> None:
        layout = RunLayout(str(tmp_path / "run"))
        track(layout, 0, range(1, 8), options)
        assert self.run_of(client).info.status == "KILLED"
        track(layout, 4, range(5, 10), options, finished=True)
        run = self.run_of(client)
        assert run.info.status == "FINISHED"
        assert [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] == [*range(1, 10)]

    def test_a_store_that_fails_does_not_end_the_run(
        self, client: Any, options: Logging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[str] = []
        tracker = Tracker(RunLayout(str(tmp_path / "run")), options, RECIPE, say=said.append)
        tracker.start(0)
        for folder in (tmp_path / "store").rglob("metrics"):
            folder.rmdir()
            folder.write_text("in the way")
        for step in range(1, 4):
            tracker.record("train", step, {"loss": 1.0})
        tracker.close(True)
        assert sum("Training continues" in line for line in said) == 1

    def test_a_store_that_cannot_be_used_is_one_message(
        self, client: Any, options: Logging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://store")
        with pytest.raises(InputError, match="MLFLOW_TRACKING_URI"):
            track(RunLayout(str(tmp_path / "run")), 0, range(1, 2), options)


def test_names_are_what_mlflow_takes() -> None:
    assert metric_name("validation/PSnDCG@10") == "validation/PSnDCG_at_10"


class TestWeightsAndBiases:
    @pytest.fixture
    def options(self, monkeypatch: pytest.MonkeyPatch) -> Logging:
        pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
        monkeypatch.setenv("WANDB_MODE", "offline")
        return Logging(tensorboard=False, wandb="tate")

    def test_it_has_numbers_recipe_and_state(self, options: Logging, tmp_path: Path) -> None:
        said = track(RunLayout(str(tmp_path / "run")), 0, range(1, 4), options, finished=True)
        (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
        records = list(records_of(file))
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        assert (run.project, run.display_name) == ("tate", "run")
        recipe = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert {name: recipe[name] for name in RECIPE} == RECIPE
        assert losses_of(records) == pytest.approx({1: 1, 2: 1 / 2, 3: 1 / 3})
        (end,) = [record.exit for record in records if record.WhichOneof("record_type") == "exit"]
        assert end.exit_code == 0
        assert str(file.parent) in said[0]

    def test_a_resumed_run_has_the_same_identity(self, options: Logging, tmp_path: Path) -> None:
        layout = RunLayout(str(tmp_path / "run"))
        track(layout, 0, range(1, 8), options)
        track(layout, 4, range(5, 10), options, finished=True)
        files = sorted((tmp_path / "run" / "wandb").rglob("*.wandb"))
        runs = [next(record.run for record in records_of(file) if record.HasField("run")) for file in files]
        assert len({run.run_id for run in runs}) == 1


def losses_of(records: list[Any]) -> dict[int, float]:
    """Return the training losses by step."""
    losses = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            losses[int(values["_step"])] = float(values["train/loss"])
    return losses


def records_of(file: Path) -> Iterator[Any]:
    """Read W&B's log: after a head of 7 bytes, blocks of 32 KiB with pieces (CRC, length, type) of records."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its own process has written all of it then
    data, position, whole = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record
