"""A miner that dies is said at once, and started again; one that is wrong or done is not."""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from extremis import miner
from extremis.console import output
from extremis.miner import Miner


def script(counter: Path, body: str) -> list[str]:
    """A process that leaves a line in `counter` and then does `body`."""
    return [sys.executable, "-c", f"import os, sys, time; open({str(counter)!r}, 'a').write('.\\n'); {body}"]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    lines: list[str] = []
    monkeypatch.setattr(miner, "RESTART_PAUSES", (0.05, 0.1, 0.2))
    with output(listener=lambda event: lines.append(event.text)):
        yield lines


def wait_until_quiet(process: Miner) -> None:
    process._thread.join(30)
    assert not process._thread.is_alive()


@pytest.mark.parametrize(
    ("body", "words", "starts"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL (perhaps out of memory)", 4),
        ("sys.exit('no room')", "ended with status 1: no room", 4),
        *((f"sys.exit({status})", f"ended with status {status}", 4) for status in (3, 5, 6, 137)),
        *((f"sys.exit({status})", f"ended with status {status} and is not started again", 1) for status in (2, 4)),
        ("sys.exit(0)", "", 1),
    ],
)
def test_how_often_it_is_started(tmp_path: Path, said: list[str], body: str, words: str, starts: int) -> None:
    ended, logged = threading.Event(), list[str]()
    process = Miner(script(tmp_path / "starts", body), logged.append, ended)
    wait_until_quiet(process)
    assert ended.is_set()
    process.stop()
    assert len((tmp_path / "starts").read_text().splitlines()) == starts
    assert all(words in line for line in said)
    assert len(said) == (starts if words else 0)
    assert logged == ["miner: no room"] * (starts if "room" in body else 0)
    if starts > 1:
        assert [line.rpartition("; ")[2] for line in said[:-1]] == [
            "restart in 0.05 s (1 of 3)",
            "restart in 0.1 s (2 of 3)",
            "restart in 0.2 s (3 of 3)",
        ]
        assert "is not started again: later epochs use older tables" in said[-1]


def test_one_that_works_is_stopped_quietly(tmp_path: Path, said: list[str]) -> None:
    process = Miner(script(tmp_path / "starts", "time.sleep(600)"), print)
    process.stop()
    assert process.process.returncode is not None
    assert said == []


def test_a_killed_one_is_replaced_while_it_is_watched(tmp_path: Path, said: list[str]) -> None:
    process = Miner(script(tmp_path / "starts", "time.sleep(600)"), print)
    first = process.process
    first.kill()
    limit = time.monotonic() + 30
    while process.process is first:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert process.process.poll() is None
    process.stop()
    assert len(said) == 1
