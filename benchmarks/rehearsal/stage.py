"""Stages of a rehearsal: tasks and results, and the process of each stage."""

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
from schemas.process import end_with_parent


@dataclass(frozen=True)
class Sizes:
    """Sizes of a workload, named as in `Workload`, and of mining; workers can read them without loading the trainer."""

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
    """Task of a rehearsal with files below `folder`: run `recipe` as rank `rank` of `ranks`.

    `seconds`: approximate time for all stages. `dump_share`: fraction of a dump's embeddings to write.
    """

    folder: str
    sizes: Sizes
    seconds: float
    recipe: Any = None
    rank: int = 0
    ranks: int = 1
    dump_share: float = 1.0


@dataclass(frozen=True)
class Stage:
    """Measurements of a stage of `step`: seconds; bytes in memory, in storage and in messages; number of messages.

    None means not measured. `note`: how much of the stage was done.
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
    """Return the total bytes of all files below a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def run_in_process(stages: Callable[[Task], list[Stage]], task: Task) -> list[Stage]:
    """Run `stages(task)` in a new process. Raises the errors of `stages`, and ExtremisError if the process died."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _follow, (task.folder,)) as process:
        try:
            return process.submit(stages, task).result()
        except BrokenProcessPool:
            raise ExtremisError(
                "a process of the rehearsal was killed, perhaps because the machine ran out of memory."
            ) from None


def _follow(folder: str) -> None:
    """Write all temporary files of this process to `folder`, and end the process when its parent ends."""
    end_with_parent()
    tempfile.tempdir = os.environ["TMPDIR"] = folder


@contextlib.contextmanager
def removed_if_killed(folder: str) -> Iterator[None]:
    """Make sure that `folder` is removed if this process is killed within the block."""
    watch = "import shutil, sys, time; sys.stdin.read(); time.sleep(1); shutil.rmtree(sys.argv[1], ignore_errors=True)"
    command = [sys.executable, "-S", "-c", watch, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watcher:
        try:
            yield
        finally:
            watcher.kill()
