"""Processes: where they are forked, which are alive of a session or with a word in them, and waiting for their end."""

import contextlib
import multiprocessing
import threading
import time
from pathlib import Path

# Processes are forked from one that has imported once what commands and ranks need, and has computed nothing. PyTorch
# imports the last two by itself, with the first gradient and the first optimizer.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        *("extremis.cli", "pipelines.shard", "trainer.loop", "trainer.evaluation.evaluate", "scoring.export"),
        *("tests.forks", "tests.ranks", "pytest", "hypothesis", "pandas", "faiss"),
        *("torch.fx.experimental.symbolic_shapes", "torch._dynamo"),
    ]
)


def alive(session: int) -> list[int]:
    """List the processes of a session (one started with `start_new_session`) that still run, zombies left out."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, owner = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(owner) == session and state != "Z":
            pids.append(int(stat.parent.name))
    return pids


def wait_until_gone(session: int, seconds: float = 20.0) -> None:
    """Wait until no process of the session runs."""
    limit = time.monotonic() + seconds
    while alive(session):
        assert time.monotonic() < limit, "a process outlived the one that started it"
        time.sleep(0.01)


def with_word(word: str, of: str = "cmdline") -> list[str]:
    """Return the command lines of processes with `word` in a file `of` /proc: `cmdline`, or `environ`."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
            if word.encode() in (process / of).read_bytes():
                lines.append((process / "cmdline").read_text().replace("\0", " "))
    return lines


def wait_until_none(word: str, of: str = "cmdline", seconds: float = 120.0) -> None:
    """Wait until no process has `word`, as `with_word` looks for it."""
    limit = time.monotonic() + seconds
    while found := with_word(word, of):
        assert time.monotonic() < limit, found
        time.sleep(0.1)


def threads_named(prefix: str) -> list[str]:
    """Return the names of this process's threads that begin with `prefix`."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]
