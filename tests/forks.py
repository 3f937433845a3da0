"""Commands in processes of their own that start at once, forked from one that has imported all; one may kill itself.

Run as a module it is that process: a line of JSON for each group of commands, which run side by side.
"""

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.command import ROOT, Done, environment

_IMPORTED = ("pipelines.shard", "trainer.loop", "trainer.export.export", "extremis.cli")
# Whatever puts a file in its place, or takes it away.
_EVENTS = ("os.rename", "os.link", "os.remove", "shutil.rmtree")


class Ended(NamedTuple):
    """End of a command; its `status` is negative for a signal. `changes` of files, where it ended by itself."""

    done: Done
    changes: int

    @property
    def killed(self) -> bool:
        return self.done.status == -signal.SIGKILL


class Forks:
    """The process that others are forked from."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._requests = 0

    def run(self, *commands: Sequence[object], kill_at: int | None = None, apart: float = 0.0) -> list[Ended]:
        """Run `extremis` with each of `commands` at once, each `apart` seconds after the one before, to their ends.

        `kill_at`: the change of files before which the first one ends by SIGKILL.
        """
        self._requests += 1
        words = [[str(word) for word in command] for command in commands]
        request = {"number": self._requests, "commands": words, "kill_at": kill_at, "apart": apart}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        number = 0
        while number != self._requests:  # nobody waited for an answer before
            number, answers = json.loads(self._process.stdout.readline())
        return [Ended(Done(status, out, err), changes) for status, out, err, changes in answers]

    def extremis(self, *command: object) -> Done:
        """Run one command, which has to succeed."""
        ((done, _),) = self.run(command)
        assert done.status == 0, f"{command}: status {done.status}\n{done.err}"
        return done


@contextmanager
def forks() -> Iterator[Forks]:
    """Start the process, for the block."""
    command = [sys.executable, "-m", "tests.forks"]
    options: dict[str, Any] = {"cwd": ROOT, "env": environment(), "text": True}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options) as process:
        try:
            yield Forks(process)
        finally:
            process.kill()


def _serve() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else is written to the pipe
    for line in sys.stdin:
        request = json.loads(line)
        children = []
        for number, words in enumerate(request["commands"]):
            if number:
                time.sleep(request["apart"])
            children.append(_fork(words, request["kill_at"] if number == 0 else None))
        answers.write(json.dumps([request["number"], [_wait_for(*child) for child in children]]) + "\n")
        answers.flush()


def _fork(words: list[str], kill_at: int | None) -> tuple[int, int]:
    """Run a command in a child; its process, and the end of the pipe that it answers through."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    os.close(reading)
    status = 1
    try:
        status = _work(words, kill_at, writing)
    finally:
        os._exit(status)


def _work(words: list[str], kill_at: int | None, writing: int) -> int:
    from extremis.cli import main

    changes = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal changes
        # A claim's signs of life come as time passes: they are not counted.
        if event in _EVENTS and not any(".claim-beat-" in str(argument) for argument in arguments):
            changes += 1
            if changes == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
            status = 1
    with os.fdopen(writing, "w") as pipe:
        json.dump([out.getvalue(), err.getvalue(), changes], pipe)
    return status


def _wait_for(process: int, reading: int) -> tuple[int, str, str, int]:
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    _, ended = os.waitpid(process, 0)
    out, err, changes = json.loads(answer) if answer else ("", "", 0)
    return os.waitstatus_to_exitcode(ended), out, err, changes


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` by its path, but commands, and what nobody reads of processes that were killed."""
    left = (".claim-beat-", ".tmp-", "commands.json")
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(left))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


if __name__ == "__main__":
    _serve()
