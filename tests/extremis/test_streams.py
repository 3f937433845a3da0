"""Standard streams that are closed, full, or read by nobody: a command works on, and its status is the right one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.command import ROOT, command, environment

SHOW = ("recipes", "show", "astra", "-q")  # no word of being at work, however slow the machine
COMMANDS = {SHOW: 0, ("recipes", "show", "no-such"): 2}


@contextmanager
def stream(kind: str, full: Path) -> Iterator[Any]:
    """Open what a stream of this kind writes to; what is closed is closed later."""
    if kind == "unread":
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "wb") as file:
            yield file
    else:
        with (full if kind == "full" else full.with_name(kind)).open("wb") as file:
            yield file


def run(words: tuple[str, ...], full: Path, **kinds: str) -> int:
    """Run a command whose standard streams are of these `kinds`; its status."""
    closed = "".join(
        f" {sign}&-" for sign, name in (("0<", "in"), ("1>", "out"), ("2>", "err")) if kinds[name] == "closed"
    )
    shell = ["sh", "-c", f'exec "$@"{closed}', "sh", *command(*words)]
    with stream(kinds["out"], full) as out, stream(kinds["err"], full) as err:
        return subprocess.run(
            shell, stdin=0, stdout=out, stderr=err, cwd=ROOT, env=environment(), check=False
        ).returncode


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("kind", ["closed", "full", "unread"])
def test_messages_that_cannot_be_written_change_nothing(kind: str, words: tuple[str, ...], full: Path) -> None:
    assert run(words, full, **{"in": "closed", "out": "out", "err": kind}) == COMMANDS[words]
    text = full.with_name("out").read_text()
    assert text.startswith('method = "astra"') if COMMANDS[words] == 0 else text == ""


RESULTS = [
    *(("closed", SHOW), ("unread", SHOW), ("unread", (*SHOW, "--json")), ("unread", ("--help",))),
    *(("full", SHOW), ("full", (*SHOW, "--json", "-q")), ("full", ("--help",))),
]


@pytest.mark.parametrize(("kind", "words"), RESULTS)
def test_results_that_cannot_be_written_are_one_error(kind: str, words: tuple[str, ...], full: Path) -> None:
    """Or none: who closes them does not want them, who stops to read them has enough."""
    assert run(words, full, **{"in": "closed", "out": kind, "err": "err"}) == 6 * (kind == "full")
    message = "error: cannot write to standard output: No space left on device. Redirect it to another location.\n"
    assert full.with_name("err").read_text() == (message if kind == "full" else "")


def test_whoever_has_read_enough_changes_no_work(data: Path, tmp_path: Path, full: Path) -> None:
    """`extremis inspect data/ --verify | head -1` has the status of what it verifies."""
    streams = {"in": "closed", "out": "unread", "err": "err"}
    assert run(("inspect", str(data), "--verify", "-q"), full, **streams) == 0
    assert full.with_name("err").read_text() == ""
    damaged = shutil.copytree(data, tmp_path / "damaged")
    shard = next((damaged / "labels").glob("part-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert run(("inspect", str(damaged), "--verify"), full, **streams) == 2
    assert "Traceback" not in full.with_name("err").read_text()


@pytest.mark.parametrize("change", ["= None", ". close()"])
def test_a_daemon_without_streams_imports_it(change: str) -> None:
    code = f"import sys; sys.stdout {change}; sys.stderr {change}; import os, extremis; extremis.recipes(); os._exit(7)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 7
