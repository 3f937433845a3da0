"""Stages of a rehearsal: what they are told and tell, and the process of its own that each runs in."""

import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import ExtremisError


@dataclass(frozen=True)
class Sizes:
    """Sizes of a workload, as `Workload` names them, and of its search: no trainer is loaded with them."""

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
    width: int = 0  # K
    block_rows: int = 0
    blocks: int = 0
    batch: int = 0
    index: str = ""


@dataclass(frozen=True)
class Task:
    """What is rehearsed below `folder`: `recipe` on rank `rank` of `ranks`, with the rows of DATA `data` or made up.

    `seconds` are those of all stages, about; `dumped`: the share of a dump's embeddings that is written.
    """

    folder: str
    sizes: Sizes
    seconds: float
    recipe: Any = None
    rank: int = 0
    ranks: int = 1
    dumped: float = 1.0
    data: str | None = None


@dataclass(frozen=True)
class Stage:
    """What a stage of a `step` took: seconds; bytes of the process, written or read, and sent; None: not counted.

    `note`: how much of it was done, where that is not all.
    """

    step: str
    name: str
    seconds: float
    memory: int | None = None
    storage: float | None = None
    network: float | None = None
    note: str = ""


def peak_bytes() -> int | None:
    """Return the most memory that this process has held since it started; None where the system does not say."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def size_of(folder: str) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def apart(stages: Callable[[Task], list[Stage]], task: Task) -> list[Stage]:
    """Return `stages(task)`, run in a process of its own, which removes the folder should this one be killed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(False)
    process = context.Process(target=_work, args=(theirs, stages, task), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        raise ExtremisError(
            f"a process of the rehearsal ended with status {process.exitcode}: the system may have had no memory left."
        ) from None
    finally:
        process.terminate()
        process.join()
    if isinstance(answer, BaseException):
        raise answer
    return list(answer)


def _work(answer: Any, stages: Callable[[Task], list[Stage]], task: Task) -> None:
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        assert parent is not None
        parent.join()
        shutil.rmtree(task.folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    tempfile.tempdir = task.folder
    try:
        answer.send(stages(task))
    except (Exception, KeyboardInterrupt) as error:
        answer.send(error)
