"""Stages of a rehearsal: their tasks and results, and the process in which each runs."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import ExtremisError
from schemas.processes import end_with_parent


@dataclass(frozen=True)
class Sizes:
    """Sizes of a workload, as `Workload` names them, and of its search; a worker that has them loads no trainer."""

    queries: int
    labels: int
    tokens: float
    label_tokens: float
    labels_per_query: float
    key_bytes: float
    text_bytes: float
    vocabulary: int
    columns: int
    input_bytes: int
    memory: int
    width: int  # K
    block_rows: int = 0
    blocks: int = 0
    batch: int = 0
    index: str = ""


@dataclass(frozen=True)
class Task:
    """What is rehearsed below `folder`: `recipe` on rank `rank` of `ranks`.

    `seconds`: approximate time of all stages; `dumped`: the share of a dump's embeddings that is written.
    """

    folder: str
    sizes: Sizes
    seconds: float
    recipe: Any = None
    rank: int = 0
    ranks: int = 1
    dumped: float = 1.0


@dataclass(frozen=True)
class Stage:
    """Measurements of a stage or `step`: seconds; bytes of memory, of storage, and of messages, with their number.

    None: not counted. `note`: how much of the stage was done.
    """

    step: str
    name: str
    seconds: float
    memory: int | None = None
    storage: float | None = None
    network: float | None = None
    messages: float = 0.0
    note: str = ""


def size_of(folder: str) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def run_in_process(stages: Callable[[Task], list[Stage]], task: Task) -> list[Stage]:
    """Return `stages(task)`, run in a new process. Raises its errors, and ExtremisError if the process died."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _follow, (task.folder,)) as process:
        try:
            return process.submit(stages, task).result()
        except BrokenProcessPool:
            raise ExtremisError(
                "a process of the rehearsal was killed, perhaps because the machine ran out of memory."
            ) from None


def _follow(folder: str) -> None:
    """Keep all that this process writes in `folder`, and end with the parent."""
    end_with_parent()
    tempfile.tempdir = os.environ["TMPDIR"] = folder


@contextlib.contextmanager
def removed_if_killed(folder: str) -> Iterator[None]:
    """Have `folder` removed should this process be killed within the block."""
    watch = "import shutil, sys, time; sys.stdin.read(); time.sleep(1); shutil.rmtree(sys.argv[1], ignore_errors=True)"
    command = [sys.executable, "-S", "-c", watch, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watcher:
        try:
            yield
        finally:
            watcher.kill()
