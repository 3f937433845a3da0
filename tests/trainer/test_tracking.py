"""metrics.jsonl and TensorBoard: whole behind any URL, and without what a resumed run will record again."""

import json
from pathlib import Path

import pytest

from schemas import storage
from schemas.errors import InputError
from schemas.layout import RunLayout
from schemas.storage import join
from trainer import tracking
from trainer.methods.sections import Logging
from trainer.tracking import Tracker, read_metrics


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunLayout:
    return RunLayout(str(tmp_path / "run") if request.param == "local" else f"memory://tracking/{tmp_path.name}")


def track(run: RunLayout, resume_at: int, steps: range, tensorboard: bool = False) -> Tracker:
    tracker = Tracker(run, Logging(tensorboard=tensorboard))
    tracker.start(resume_at)
    for step in steps:
        tracker.record("train", step, {"loss": 1 / step, "epoch": 0})
    tracker.sync()
    return tracker


def test_records_come_back_in_order(run: RunLayout) -> None:
    track(run, 0, range(1, 4)).close()
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3]
    assert read_metrics(run)[1] == {"kind": "train", "step": 2, "loss": 0.5, "epoch": 0}


def test_a_resumed_run_drops_what_lies_beyond_its_checkpoint(run: RunLayout) -> None:
    track(run, 0, range(1, 8))  # never closed: as if killed
    track(run, 4, range(5, 7)).close()
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4, 5, 6]


def test_a_new_run_starts_empty(run: RunLayout) -> None:
    track(run, 0, range(1, 4)).close()
    track(run, 0, range(1, 2)).close()
    assert [record["step"] for record in read_metrics(run)] == [1]


def test_a_line_cut_off_by_a_crash_is_left_out(run: RunLayout) -> None:
    track(run, 0, range(1, 4)).close()
    content = storage.read_bytes(run.metrics)
    storage.write_bytes(run.metrics, content + b'{"kind": "train", "st')
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3]
    track(run, 3, range(4, 5)).close()
    assert [json.loads(line)["step"] for line in storage.read_bytes(run.metrics).splitlines()] == [1, 2, 3, 4]


def test_records_that_cannot_be_written_stop_nothing_and_are_told_once(tmp_path: Path, full: Path) -> None:
    lines: list[str] = []
    tracker = Tracker(RunLayout(str(tmp_path)), Logging(tensorboard=False), say=lines.append)
    tracker.start(0)
    tracker._file.close()
    tracker._file = full.open("a")
    for step in range(1, 4):
        tracker.record("train", step, {"loss": 1.0})
        tracker.sync()
    tracker.close()
    assert lines == [f"{tmp_path}/metrics.jsonl: records are lost: No space left on device. Training continues"]


def test_tensorboard_holds_the_numbers(run: RunLayout, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track(run, 0, range(1, 4), tensorboard=True).close()
    names = storage.list_names(run.tensorboard)
    assert len(names) == 1
    copy = tmp_path / names[0]
    copy.write_bytes(storage.read_bytes(join(run.tensorboard, names[0])))
    events = EventAccumulator(str(copy))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx([1, 1 / 2, 1 / 3])


def test_without_tensorboard_a_line_says_so_and_true_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    lines = []
    tracker = Tracker(RunLayout(str(tmp_path)), Logging(), say=lines.append)
    tracker.start(0)
    tracker.record("train", 1, {"loss": 1.0})
    tracker.close(finished=True)
    assert lines == [f"{tmp_path}/tensorboard is not written: tensorboard is not installed (extra `tensorboard`)"]
    assert [record["loss"] for record in read_metrics(RunLayout(str(tmp_path)))] == [1.0]
    with pytest.raises(InputError, match=r"needs tensorboard\. Install the extra `tensorboard`"):
        Tracker(RunLayout(str(tmp_path)), Logging(tensorboard=True))
    assert not (tmp_path / "tensorboard").exists()


def test_no_run_has_no_records() -> None:
    assert read_metrics(RunLayout("memory://tracking/nowhere")) == []
