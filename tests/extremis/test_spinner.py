"""Signs of life: a command that says nothing is seen to be at work, one that speaks is not interrupted."""

import os
import pty
import subprocess
import sys
import time

import pytest

from extremis import spinner
from extremis.spinner import hidden_spinner, run_spinner, show_activity
from tests.command import ROOT, environment

_COMMAND = """
import time
from extremis.console import show_spinner, results, say
with show_spinner("plan: at work"):
    time.sleep(1.2)
    results.print("a result")
    time.sleep(1.2)
say("the end")
"""


def run_on_terminal(code: str) -> str:
    """Run Python on a terminal; return all that it wrote there."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=slave, stderr=slave, cwd=ROOT, env=environment({"TERM": "xterm"})
    )
    os.close(slave)
    written = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    process.wait()
    os.close(master)
    return written.decode()


def test_a_terminal_has_a_spinner_that_makes_room_for_results() -> None:
    written = run_on_terminal(_COMMAND)
    before, _, after = written.partition("a result")
    assert "plan: at work, 0 s" in before
    assert before.endswith("\r\x1b[K")
    assert "plan: at work" in after
    assert after.partition("the end")[0].endswith("\r\x1b[K")


def test_a_file_has_a_line_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(spinner, "_LINES_AFTER", 1.0)
    with run_spinner("evaluate: at work", on_terminal=False, print_line=lines.append):
        time.sleep(0.5)
        assert lines == []
        show_activity("evaluate: measuring baselines")
        while not lines:
            time.sleep(0.1)
        with hidden_spinner():
            time.sleep(0.5)
    assert lines == ["evaluate: measuring baselines, 1 s"]
