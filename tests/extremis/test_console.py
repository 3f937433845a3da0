"""Output for people: numbers are whole at any width of the terminal; text of data cannot steer a terminal."""

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
main(["predict", "--k", text])
"""
HOSTILE = "\x1b]0;title\x07\x9b31m\x1b[2J\u202eover\x7f \rback [/b][red] :car:"


def test_text_of_data_cannot_steer_a_terminal(tmp_path: Path) -> None:
    """On a terminal no control character arrives that rich did not make, and markup is text."""
    (tmp_path / "file").write_text(f"{HOSTILE}\r\n" * 2)
    terminal, end = os.openpty()
    command = [sys.executable, "-c", _SPEAK, str(tmp_path / "file"), HOSTILE]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment({"TERM": "dumb", "COLUMNS": "300"}), stdout=end, stderr=end
    ) as process:
        os.close(end)
        shown = b""
        while chunk := _read(terminal):
            shown += chunk
    os.close(terminal)
    assert process.returncode == 2
    lines = shown.decode().replace("\r", "").splitlines()
    assert sum("[/b][red] :car:" in line for line in lines) >= 11
    assert [line for line in lines if not line.replace("\t", " ").isprintable()] == []


def _read(terminal: int) -> bytes:
    """Read what was shown; nothing where the other end is closed, which Linux calls an error."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def test_text_of_data_goes_into_pipes_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(HOSTILE.encode())
    command = [sys.executable, "-c", _SPEAK, str(tmp_path / "file"), HOSTILE]
    done = subprocess.run(command, cwd=ROOT, env=environment({"COLUMNS": "300"}), capture_output=True, check=False)
    assert done.stdout.endswith(HOSTILE.encode())
    kept = "\x1b]0;title\x9b31m\x1b[2J\u202eover\x7f back [/b][red] :car:"  # rich leaves out the bell and returns
    assert done.stderr.decode().splitlines()[:2] == [kept, kept]
