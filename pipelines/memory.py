"""The memory of a worker that tables are planned for: it decides blocks and batches, and so the bytes of a table."""

import contextlib
import sys
from typing import TypeVar

from pipelines.options import MemoryOptions
from pipelines.progress import Progress
from schemas import storage
from schemas.errors import option
from schemas.layout import MEMORY
from schemas.process import memory_share
from schemas.sizes import say_bytes
from schemas.storage import join, read_json, write_json

STEPS = tuple(4 << 30 >> halvings for halvings in range(4))  # 4, 2, 1 and 0.5 GiB; few, so that tables stay the same
Given = TypeVar("Given", bound=MemoryOptions)


def with_memory(given: Given, folder: str, here: bool, say: Progress) -> Given:
    """Return the options with their memory: as given, else as kept in `folder`, else the largest step that fits.

    A step fits if this process may use as much; other machines (not `here`) are expected to have enough.
    """
    share, memory, why = memory_share() if here else sys.maxsize, given.memory, ""
    if is_default := "memory" not in given.model_fields_set:
        memory = next((step for step in STEPS if step <= share), STEPS[-1])
        with contextlib.suppress(FileNotFoundError):
            memory, why = read_json(join(folder, MEMORY))["memory"], f", as in {join(folder, MEMORY)}"
    if memory > share or (is_default and memory < STEPS[0]):
        limit = f": this process may use {say_bytes(share)}" if here else ""
        say(f"{option('memory', say_bytes(memory).replace(' ', ''))}{why}{limit}")
    return given.model_copy(update={"memory": memory})


def keep_memory(given: MemoryOptions, memory: int, folder: str) -> None:
    """Keep `memory`, unless it was given, for a resumed run and later tables in `folder`. Raises StorageError."""
    if "memory" not in given.model_fields_set and not storage.exists(join(folder, MEMORY)):
        write_json(join(folder, MEMORY), {"memory": memory})
