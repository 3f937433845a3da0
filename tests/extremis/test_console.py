"""Output for people, on a terminal and in a pipe: whole numbers, clean texts, and signs of life."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT, environment

_SHOW = """
from extremis.console import table
columns = ["recipe", *(f"PSP@{k}" for k in range(6))]
table("figures", columns, [["nn-top-uniform", *(f"{k}1.75 ±0.5{k}" for k in range(6))]])
"""


@pytest.mark.parametrize("columns", [None, 80, 72])
def test_no_figure_of_a_table_is_cut_off(columns: int | None) -> None:
    env = environment({} if columns is None else {"COLUMNS": str(columns)})
    if columns is None:
        env.pop("COLUMNS", None)
    done = subprocess.run(
        [sys.executable, "-c", _SHOW],
        cwd=ROOT,
        env={**env, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        check=True,
    )
    shown = done.stdout.decode()
    assert all(f"{k}1.75" in shown and f"±0.5{k}" in shown for k in range(6))
    assert "nn-top-uniform" in shown
    longest = max(map(len, shown.splitlines()))
    assert longest <= (columns or 200)
    if columns is None:
        assert "01.75 ±0.50 │" in shown


_SPEAK = """
import sys
from scoring.predict import Label, Prediction, Predictions
from extremis.result import Result
from extremis.cli import main
from extremis.console import Bar, messages, print_file, print_json, results, say, table
path, text = sys.argv[1:]
with Bar(text, 1) as bar:
    bar.update(1, text)
say(text)
messages.print(text)
results.print(text)
table(text, [text], [[text]])
print_json({text: text})
print(Predictions([Prediction(text, (Label(text, text, 1.0),), 1)]), Result(more={"a": text}, shown=[text]))
print_file(path)
sys.stdout.flush()
main(["predict", "exported", "in.txt", "out.jsonl", "--max-labels", text])
"""
HOSTILE = "\x1b]0;title\x07\x9b31m\x1b[2J\u202eover\x7f \rback [/b][red] :car:"


def test_text_of_data_cannot_steer_a_terminal(tmp_path: Path) -> None:
    """On a terminal no control character arrives that rich did not make, and markup is text."""
    (tmp_path / "file").write_text(f"{HOSTILE}\r\n" * 2)
    shown = on_terminal(_SPEAK, str(tmp_path / "file"), HOSTILE, TERM="dumb", COLUMNS="300")
    assert "error: --max-labels: expected" in shown
    lines = shown.replace("\r", "").splitlines()
    assert sum("[/b][red] :car:" in line for line in lines) >= 11
    assert [line for line in lines if not line.replace("\t", " ").isprintable()] == []


def on_terminal(program: str, *arguments: str, **env: str) -> str:
    """Run Python on a terminal; return all that it writes there."""
    terminal, end = os.openpty()
    words = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(words, cwd=ROOT, env=environment(env), stdout=end, stderr=end):
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(terminal, 1 << 16):
                shown += chunk
    os.close(terminal)
    return shown.decode()


def test_text_of_data_goes_into_pipes_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(HOSTILE.encode())
    command = [sys.executable, "-c", _SPEAK, str(tmp_path / "file"), HOSTILE]
    done = subprocess.run(command, cwd=ROOT, env=environment({"COLUMNS": "300"}), capture_output=True, check=False)
    assert done.stdout.endswith(HOSTILE.encode())
    kept = "\x1b]0;title\x9b31m\x1b[2J\u202eover\x7f back [/b][red] :car:"  # rich leaves out the bell and returns
    assert done.stderr.decode().splitlines()[:2] == [kept, kept]


_WORK = """
import os, time
from extremis import console
from extremis.console import Bar, output, results, say, show_activity, show_spinner
console._LINES_AFTER = 0.5
with show_spinner("plan: at work"):
    time.sleep(1.2)
    results.print("a result")
    show_activity("plan: measuring")
    time.sleep(1.2)
    if os.fork() == 0:
        time.sleep(1.2)
        os.write(1, b"a child")
        os._exit(0)
    os.wait()
    with Bar("steps", 3) as bar:
        bar.update(1)
        time.sleep(1.2)
say("the end")
"""


def test_a_terminal_has_a_spinner_that_makes_room_for_results_and_bars() -> None:
    shown = on_terminal(_WORK, TERM="xterm")
    before, _, after = shown.partition("a result")
    assert "plan: at work, " in before
    assert before.endswith("\r\x1b[K")
    measured, _, bar = after.partition("steps")
    assert "plan: measuring, 1 s" in measured
    assert "1/3" in bar
    assert "plan:" not in bar
    assert bar.rstrip().endswith("the end")


def test_a_pipe_has_a_line_after_a_while() -> None:
    """Each line makes the next wait longer; a forked process has none; nor is there one beside a bar."""
    words = [sys.executable, "-c", _WORK]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["a result", "a child"]
    said = done.stderr.splitlines()
    assert said[0].startswith("plan: at work, ")
    assert said[-1] == "the end"
    assert all(line.startswith("plan: measuring, ") for line in said[1:-1])
    assert 2 <= len(said) <= 5
