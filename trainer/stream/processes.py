"""Position of this process among others: the rank set by the launcher, and the slice of a DataLoader worker."""

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

from schemas.errors import InputError

_BYTES = 1 << 16


class Ranks(NamedTuple):
    """`rank` in [0, `ranks`)."""

    rank: int
    ranks: int


def ranks_of_environment(environment: Mapping[str, str] | None = None) -> Ranks:
    """Return RANK and WORLD_SIZE from the environment, as set by `torchrun` and other launchers; default (0, 1).

    Raises InputError if only one variable is set, or if a value is impossible.
    """
    variables = os.environ if environment is None else environment
    rank, ranks = variables.get("RANK"), variables.get("WORLD_SIZE")
    if rank is None and ranks is None:
        return Ranks(0, 1)
    try:
        position = Ranks(int(rank or ""), int(ranks or ""))
    except ValueError:
        position = Ranks(-1, 0)
    if not 0 <= position.rank < position.ranks:
        raise InputError(
            f"RANK = {rank!r}, WORLD_SIZE = {ranks!r} in the environment: expected both, with 0 <= RANK < WORLD_SIZE. "
            "Launch with torchrun, which sets them, or unset both."
        )
    return position


@dataclass(frozen=True)
class WorkerSlice:
    """Worker `worker` of `workers`: a loader takes batches from workers in turn, so a worker deals every n-th step."""

    worker: int
    workers: int


def slice_of_process() -> WorkerSlice | None:
    """Return the slice of this process; None outside DataLoader workers."""
    info = get_worker_info()
    return None if info is None else WorkerSlice(info.id, info.num_workers)


class WorkerChannel:
    """Shared memory with the last message of the main process to copies of a stream in persistent workers.

    The memory is anonymous, and is freed when the processes end. If a loader spawns workers, the memory moves to
    /dev/shm, which may be small in a container. Writer and readers take turns: a loader's workers begin an epoch only
    after the owner has called `set_epoch`.
    """

    def __init__(self) -> None:
        self._text = torch.frombuffer(mmap.mmap(-1, _BYTES), dtype=torch.uint8)
        # (number, bytes of the text, skipped rows)
        self._header = torch.frombuffer(mmap.mmap(-1, 3 * 8), dtype=torch.int64)

    @property
    def number(self) -> int:
        """Number of messages written so far."""
        return int(self._header[0])

    def write(self, body: dict[str, Any]) -> None:
        """Write the next message. Raises InputError if the message does not fit."""
        text = json.dumps(body).encode()
        if len(text) > _BYTES:
            raise InputError(
                f"the URLs of the negatives take {len(text):,} bytes, and the limit for workers is {_BYTES:,}: use "
                "shorter URLs, or fewer sources."
            )
        self._text.numpy()[: len(text)] = np.frombuffer(text, np.uint8)
        self._header[1] = len(text)
        self._header[0] += 1

    def read(self) -> dict[str, Any]:
        """Read the last message."""
        body: dict[str, Any] = json.loads(self._text.numpy()[: int(self._header[1])].tobytes())
        return body

    @property
    def skipped(self) -> int:
        """Number of rows skipped so far, in all processes."""
        return int(self._header[2])

    def skip(self, rows: int) -> None:
        """Add `rows` to the number of skipped rows."""
        self._header[2] += rows
