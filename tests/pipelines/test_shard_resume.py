"""A sharding run that was cut off is gone on from after its last finished phase, to the same bytes."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.shard import ShardOptions, shard
from pipelines.sharding import read, rows
from schemas import storage
from schemas.errors import InputError, StorageError
from schemas.layout import phases
from schemas.shard_files import shards
from tests.pipelines.raw import contents

OPTIONS = ShardOptions(tokenizer="train:200", shards=3, row_group_rows=4)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Points and labels with string keys, and a reject in each phase."""
    folder = tmp_path / "raw"
    folder.mkdir()
    points = [{"key": f"q{i}", "text": f"point {i} of sea", "labels": [f"l{i % 7}", f"l{i % 5}"]} for i in range(60)]
    points += [{"key": "lost", "text": "x", "labels": ["none"]}, {**points[3], "text": "again"}, {"key": "bad"}]
    records = {"train": points, "labels": [{"key": f"l{i}", "text": f"label {i}"} for i in range(7)]}
    for name, points in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in points))
    return folder


def lenient(**options: Any) -> ShardOptions:
    return OPTIONS.model_copy(update={"max_reject_share": 0.2, **options})


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_: Any) -> None:
    raise StorageError("the disk is full")


# A step of each pipeline, and what a later run says.
STEPS: dict[str, tuple[Any, str, str]] = {
    "read": (read, "parse_block", ""),
    "join": (rows, "look_up", "rows have been read"),
    "tokenize": (rows, "attach_labels", "rows have been read, and label ids are known"),
    "write": (shards, "write_shard", "rows have been read and tokenized"),
    "write labels": (rows, "count_tokens", "rows have been read and tokenized"),
}


def cut_off(
    raw: Path, out: Path, step: str, how: Callable[..., None], options: ShardOptions, lines: list[str] | None = None
) -> None:
    """Run until the step, which ends the run."""
    module, name, _ = STEPS[step]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, how)
        shard(str(raw), str(out), options, progress=None if lines is None else lines.append)


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[pytest.mark.slow] * (step in ("join", "write labels"))) for step in STEPS]
)
def test_a_run_that_is_killed_is_gone_on_from(raw: Path, tmp_path: Path, step: str) -> None:
    out, whole = tmp_path / "data", tmp_path / "whole"
    shard(str(raw), str(whole), lenient())
    process = multiprocessing.get_context("fork").Process(target=cut_off, args=(raw, out, step, die, lenient()))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    lines = go_on(raw, out, lenient(), STEPS[step][2])
    assert any("taken over from" in line for line in lines)
    assert contents(out) == contents(whole)


def go_on(raw: Path, out: Path, options: ShardOptions, done: str) -> list[str]:
    """Run again; no step of a phase that is `done` may be at work. Returns the lines."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if done:
            patch.setattr(read, "parse_block", fail)
        if "ids" in done or "tokenized" in done:
            patch.setattr("pipelines.shard.join_labels", fail)
        if "tokenized" in done:
            patch.setattr("pipelines.shard.tokenize", fail)
        shard(str(raw), str(out), options, progress=lines.append)
    assert [line.partition("resuming: ")[2] for line in lines if "resuming: " in line] == ([done] if done else [])
    return lines


def test_an_error_that_may_pass_keeps_what_is_finished_and_says_so(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    lines: list[str] = []
    with pytest.raises(StorageError, match="disk is full"):
        cut_off(raw, out, "write", fail, lenient(), lines)
    assert lines[-1].endswith(
        "interrupted. The same command resumes from the last finished phase; overwrite=True starts from the beginning"
    )
    kept = storage.list_names(phases(str(out)))
    assert [name.partition("-")[0] for name in kept] == ["labels", "rejects", "rows", "tokenized.json"]
    go_on(raw, out, lenient(), "rows have been read and tokenized")
    assert not (out / ".staging").exists()


@pytest.mark.slow
def test_other_options_other_input_and_overwrite_begin_anew(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    for change in ("options", "input", "overwrite"):
        with pytest.raises(StorageError):
            cut_off(raw, out, "write", fail, lenient())
        options, lines = lenient(seed=1) if change == "options" else lenient(), list[str]()
        if change == "input":
            with (raw / "train.jsonl").open("a") as file:
                file.write('{"key": "more", "text": "more", "labels": ["l1"]}\n')
        shard(str(raw), str(out), options, progress=lines.append, overwrite=change == "overwrite")
        assert not any("resuming: " in line for line in lines)
        assert any("INPUT has changed; starting from the beginning" in line for line in lines) == (change == "input")
        whole = tmp_path / f"whole {change}"
        shard(str(raw), str(whole), options)
        assert contents(out) == contents(whole)
        storage.remove(str(out), recursive=True)


def test_however_blocks_are_grouped_and_rows_held_back_the_bytes_are_the_same(raw: Path, tmp_path: Path) -> None:
    shard(str(raw), str(tmp_path / "whole"), lenient())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "BLOCK_ROWS", 4)
        patch.setattr(rows, "_REFERENCES", 3)
        patch.setattr("pipelines.flow._HELD_BYTES", 500)
        shard(str(raw), str(tmp_path / "other"), lenient())
    assert contents(tmp_path / "whole") == contents(tmp_path / "other")


def test_bad_input_leaves_nothing(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    with pytest.raises(InputError, match="rejected"):
        shard(str(raw), str(out), lenient(max_reject_share=0.03))  # passed by the first phase, not by the last
    assert not out.exists() or contents(out) == {}
