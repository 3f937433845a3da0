"""Checkpoints: one safetensors file per label range, and a manifest with the training state. Nothing is pickled."""

import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from schemas import storage
from schemas.layout import RunLayout, list_numbers
from schemas.manifest import Shard, describe_file, is_published, read_shard, unpublish
from schemas.storage import join
from schemas.table import Table

FILE_BYTES = 1 << 28  # maximum bytes of vectors and optimizer state in a file
_VECTORS = "vectors-"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint; `state` is the state of the training loop."""

    table: Table

    @classmethod
    def open(cls, url: str) -> "Checkpoint":
        """Open the checkpoint at `url`. Raises TableError if the checkpoint is missing or damaged."""
        return cls(Table.open(url, "checkpoint"))

    @property
    def state(self) -> Mapping[str, Any]:
        return self.table.parameters

    @property
    def step(self) -> int:
        """Number of training steps before this checkpoint."""
        return int(self.state["progress"]["global_step"])

    @property
    def labels(self) -> int:
        """Number of labels L."""
        return self.table.rows

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a part called `name`."""
        return any(shard.path == f"{name}.safetensors" for shard in self.table.shards)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Read the tensors of one part (`encoder`, `encoder-optimizer`). Raises TableError."""
        return self._read(next(shard for shard in self.table.shards if shard.path == f"{name}.safetensors"))

    def vectors(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read the `weight` or an optimizer state of labels [start, stop); by default all labels. Raises TableError."""
        return torch.cat([rows[name] for _, rows in self.rows(start, self.labels if stop is None else stop)])

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield (first label, rows by name) of labels [start, stop), one file at a time. Raises TableError."""
        first = 0
        for shard in self.table.shards:
            if not shard.path.startswith(_VECTORS):
                continue
            low, high = max(start, first), min(stop, first + shard.rows)
            if low < high:
                yield low, {name: rows[low - first : high - first] for name, rows in self._read(shard).items()}
            first += shard.rows

    def read_rows(self, into: Mapping[str, torch.Tensor], start: int) -> None:
        """Fill the tensors [n, ...] that the checkpoint has for labels [start, start + n). Raises TableError."""
        stop = start + len(next(iter(into.values()), ()))
        for first, rows in self.rows(start, stop):
            for name in into.keys() & rows.keys():
                into[name][first - start : first - start + len(rows[name])] = rows[name]

    def _read(self, shard: Shard) -> dict[str, torch.Tensor]:
        url = self.table.url
        return load(read_shard(url, shard, f"Remove {url} to continue from the previous checkpoint."))


def row_ranges(start: int, stop: int, row_bytes: int) -> list[tuple[int, int]]:
    """Split labels [start, stop) into one range per file, for rows of `row_bytes` bytes, independently of the ranks."""
    rows = 1 << max(0, (FILE_BYTES // max(1, row_bytes)).bit_length() - 1)
    edges = [start, *range((start // rows + 1) * rows, stop, rows), stop]
    return [(low, high) for low, high in itertools.pairwise(edges) if low < high]


def write_rows(url: str, first: int, rows: Mapping[str, torch.Tensor]) -> Shard:
    """Write the rows [n, ...] of labels [first, first + n) to a file. Raises StorageError."""
    return write_tensors(url, f"{_VECTORS}{first:012d}", rows, len(rows["weight"]))


def write_tensors(url: str, name: str, tensors: Mapping[str, torch.Tensor], rows: int = 0) -> Shard:
    """Write tensors to a file; return the file's manifest entry, with `rows` rows of labels. Raises StorageError."""
    name = f"{name}.safetensors"
    with storage.writing(join(url, name)) as path:
        save_tensors(path, {key: value.detach().cpu().contiguous() for key, value in tensors.items()})
        return describe_file(path, name, rows)


def save_tensors(path: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Save tensors to a local safetensors file with the default file mode. Raises OSError, not the library's error."""
    with open(path, "wb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        save_file(tensors, path, metadata)
        os.chmod(path, mode)
    except SafetensorError as error:
        reason = re.search(r"os error (\d+)", str(error))
        number = int(reason[1]) if reason else errno.EIO
        raise OSError(number, os.strerror(number)) from error


def latest_checkpoint(run: RunLayout) -> Checkpoint | None:
    """Open the newest finished checkpoint of a run; return None if no checkpoint is finished."""
    for step in reversed(list_numbers(run.checkpoints)):
        if is_published(run.checkpoint(step)):
            return Checkpoint.open(run.checkpoint(step))
    return None


NEWEST = "newest"  # value of `step` for the newest checkpoint


def open_step(run: RunLayout, step: int | str | None = None) -> Checkpoint | None:
    """Open the checkpoint of step `step`, by default of `best_step`; return None if there is no checkpoint.

    With NEWEST, open the newest checkpoint.
    """
    if step == NEWEST:
        return latest_checkpoint(run)
    step = best_step(run) if step is None else step
    return None if step is None else Checkpoint.open(run.checkpoint(int(step)))


def best_step(run: RunLayout) -> int | None:
    """Return the step with the best validation metric, else the newest step; None if there is no checkpoint."""
    newest = latest_checkpoint(run)
    if newest is None:
        return None
    best: int | None = newest.state["progress"].get("best_step")
    return newest.step if best is None else best


def drop_old_checkpoints(run: RunLayout, keep: int, spare: int | None = None) -> None:
    """Remove all finished checkpoints except the newest `keep` and the checkpoint of step `spare` (the best)."""
    steps = list_numbers(run.checkpoints)
    finished = [step for step in steps if is_published(run.checkpoint(step))]
    kept = {*finished[max(0, len(finished) - keep) :], spare}
    for step in steps:
        if step not in kept:
            unpublish(run.checkpoint(step))
            storage.remove(run.checkpoint(step), recursive=True)
