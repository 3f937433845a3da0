"""Commands in processes of their own that start at once, forked from one that has imported all; one may kill itself."""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

from tests.command import ROOT, Done, environment
from tests.processes import FORKED

# Whatever puts a file in its place, or takes it away.
_EVENTS = ("os.rename", "os.link", "os.remove", "shutil.rmtree")


class Ended(NamedTuple):
    """End of a command; its `status` is negative for a signal. `changes` of files, where it ended by itself."""

    done: Done
    changes: int

    @property
    def killed(self) -> bool:
        return self.done.status == -signal.SIGKILL


def run(
    *commands: Sequence[object],
    kill_at: int | None = None,
    apart: float = 0.0,
    env: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Run `extremis` with each of `commands` at once, each `apart` seconds after the one before, to their ends.

    `kill_at`: the change of files before which the first one ends by SIGKILL.
    """
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(number)) for number in range(len(commands))]
        processes = []
        for number, (place, command) in enumerate(zip(places, commands, strict=True)):
            if number:
                time.sleep(apart)
            processes.append(start(place, *command, kill_at=kill_at if number == 0 else None, env=env))
        for process in processes:
            process.join()
        return [_ended(process.exitcode, place) for process, place in zip(processes, places, strict=True)]


def start(
    place: Path, *command: object, kill_at: int | None = None, env: Mapping[str, str] | None = None
) -> ForkServerProcess:
    """Start one command, which ends with this process; what it says goes to files in `place`."""
    place.mkdir()
    work = (place, environment(env), [str(word) for word in command], kill_at)
    process = FORKED.Process(target=_work, args=work, daemon=True)
    process.start()
    return process


def extremis(*command: object, check: bool = True, env: Mapping[str, str] | None = None) -> Done:
    """Run one command to its end; with `check`, it has to succeed."""
    ((done, _),) = run(command, env=env)
    assert not check or done.status == 0, f"{command}: status {done.status}\n{done.err}"
    return done


def _ended(status: int | None, place: Path) -> Ended:
    assert status is not None
    changes = place / "changes"
    done = Done(status, (place / "out").read_text(), (place / "err").read_text())
    return Ended(done, json.loads(changes.read_text()) if changes.exists() else 0)


def _work(place: Path, variables: Mapping[str, str], words: list[str], kill_at: int | None) -> None:
    """Be a process of `extremis WORDS`, whose output goes to files."""
    from extremis.cli import main

    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["extremis", *words]
    changes = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal changes
        # A claim's signs of life come as time passes: they are not counted.
        if event in _EVENTS and not any(".claim-beat-" in str(argument) for argument in arguments):
            changes += 1
            if changes == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    try:
        main()
    finally:
        (place / "changes").write_text(str(changes))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` by its path, but commands, and what nobody reads of processes that were killed."""
    left = (".claim-beat-", ".tmp-", "commands.json")
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(left))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
