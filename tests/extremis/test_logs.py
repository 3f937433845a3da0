"""Logs for collectors: each line on standard error is one JSON object, whoever wrote it and however a command ends."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from extremis.console import StepBars
from pipelines.progress import StepProgress
from tests.command import PROCESSES, ROOT, command, environment, extremis, sets
from tests.loop.test_kill import wait_for_step
from tests.ranks import launch

JSON = ("--log-format", "json")
KEYS = ["time", "level", "run", "process", "commit", "event", "message"]


def lines_of(text: str) -> list[dict[str, Any]]:
    """Parse a log: each line has the keys, and says its time in UTC."""
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    for line in lines:
        assert list(line)[: len(KEYS)] == KEYS, line
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert line["level"] in ("info", "warning", "error")
    return lines


def test_a_run_with_its_miner(data: Path, tmp_path: Path) -> None:
    """The trainer's lines and the miner's are one log; run.log has the same lines for people."""
    run = tmp_path / "run"
    done = extremis("run", "astra", data, run, *sets("train.epochs=3", "refresh.stale=wait"), *JSON, "--", *PROCESSES)
    lines = lines_of(done.err)
    assert {line["run"] for line in lines} == {str(run)}
    assert {line["process"] for line in lines} == {"trainer", "miner"}
    epochs = [line for line in lines if line["event"] == "epoch"]
    assert [line["epoch"] for line in epochs] == [0, 1, 2]
    assert all(line["rows"] > 0 and line["loss"] > 0 for line in epochs)
    bar = [line for line in lines if line["event"] == "progress" and line["process"] == "trainer"][-1]
    assert (bar["title"], bar["done"]) == ("train astra", bar["total"])
    log = [line.split("  ", 1)[1] for line in (run / "run.log").read_text().splitlines()]
    assert [line for line in log if "{" in line] == []
    mined = [line["message"] for line in lines if line["process"] == "miner"]
    assert [f"miner: {message}" for message in mined] == [line for line in log if line.startswith("miner: ")]


def test_a_command_that_fails_and_one_that_is_wrong(tmp_path: Path) -> None:
    line = lines_of(extremis("evaluate", tmp_path, tmp_path / "run", *JSON, check=False).err)[-1]
    assert (line["level"], line["event"], line["process"], line["status"]) == ("error", "error", "evaluate", 2)
    assert line["run"] == str(tmp_path / "run")
    assert line["kind"].endswith("Error")
    wrong = extremis("evaluate", "--no-such", env={"EXTREMIS_LOG_FORMAT": "json"}, check=False)
    (line,) = lines_of(wrong.err)
    assert (line["kind"], line["status"], wrong.status) == ("NoSuchOption", 2, 2)
    assert lines_of(extremis("evaluate", "--no-such", *JSON, check=False).err)[0]["message"] == line["message"]


@pytest.mark.slow
def test_two_ranks_are_told_apart(data: Path, tmp_path: Path) -> None:
    ranks = launch(2, *command("train", "astra", data, tmp_path / "run", *sets("train.epochs=1"), *JSON))
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    first, second = map(lines_of, said)
    assert {line["process"] for line in first} == {"trainer/rank 0"}
    assert {line["process"] for line in second} <= {"trainer/rank 1"}
    assert "epoch" in {line["event"] for line in first}
    assert "epoch" not in {line["event"] for line in second}


@pytest.mark.slow
def test_a_signal_is_answered_in_json(data: Path, tmp_path: Path) -> None:
    words = command("train", "astra", data, tmp_path / "run", *sets("train.epochs=1000"), *JSON)
    with subprocess.Popen(words, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        wait_for_step(process, tmp_path / "run", 1)
        process.send_signal(signal.SIGINT)
        lines = lines_of(process.communicate(timeout=120)[1])
    assert process.returncode == 143
    assert next(line for line in lines if line["event"] == "stop")["message"].startswith("saving a checkpoint")
    assert (lines[-1]["event"], lines[-1]["status"]) == ("error", 143)


_LIBRARIES = """
import logging, sys, threading, warnings
from extremis.cli import main
from extremis import console
from schemas.logs import log_as
def work():
    print("a text", file=sys.stderr)
    sys.stderr.write("one\\rtwo\\n\\n")
    warnings.warn("a warning")
    logging.getLogger("library").error("an error: %s", {"quoted": '"'})
    logging.disable(logging.CRITICAL)
    console.say("odd: a loss of nan", loss=float("nan"), url="s3://key:secret@bucket/x")
    console.say(f"waiting for {chr(0x2028)}{chr(27)}[2J")
    threading.Thread(target=lambda: 1 / 0).start()
log_as("test")
work()
"""


def test_texts_of_libraries_become_lines() -> None:
    env = environment({"EXTREMIS_LOG_FORMAT": "json"})
    done = subprocess.run([sys.executable, "-c", _LIBRARIES], cwd=ROOT, env=env, capture_output=True, text=True)
    lines = lines_of(done.stderr)
    assert [(line["level"], line["event"]) for line in lines[:7]] == [
        *[("info", "output")] * 3,
        ("warning", "log"),
        ("error", "log"),
        ("warning", "warning"),
        ("info", "wait"),
    ]
    assert [line["message"] for line in lines[:3]] == ["a text", "one", "two"]
    assert lines[4]["logger"] == "library"
    assert (lines[5]["loss"], lines[5]["url"]) == (None, "s3://***@bucket/x")
    assert (lines[-1]["level"], lines[-1]["kind"]) == ("error", "ZeroDivisionError")
    assert len(lines) == 8


def test_an_unknown_format_names_where_it_stands() -> None:
    done = extremis("recipes", env={"EXTREMIS_LOG_FORMAT": "xml"}, check=False)
    assert done.status == 2
    assert "EXTREMIS_LOG_FORMAT" in done.err


def test_quiet_leaves_errors(tmp_path: Path) -> None:
    assert extremis("recipes", "--json", "-q", *JSON).err == ""
    (line,) = lines_of(extremis("evaluate", tmp_path, tmp_path, "-q", *JSON, check=False).err)
    assert line["level"] == "error"


def test_steps_of_a_pipeline_are_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EXTREMIS_LOG_FORMAT", "json")
    with StepBars() as show:
        assert not show([])  # the pipeline says that workers are starting
        for rows in (1, 2, 3):
            assert show(
                [
                    StepProgress("search", rows, 3, 0, 1.0, 2, 1.0, rows == 3),
                    StepProgress("merge", 0, 3, 0, 1.0, 2, 1.0),
                ]
            )
    search, merge = lines_of(capsys.readouterr().err)
    assert (search["event"], search["title"], search["done"], search["total"]) == ("progress", "search", 3, 3)
    assert (merge["title"], merge["done"]) == ("merge", 0)
