"""Writes checkpoints by rank, in the background while the training goes on to change rows."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from schemas import storage
from schemas.layout import RunLayout
from schemas.manifest import Manifest, Shard, publish, unpublish
from schemas.owners.claim import Claim, Unclaimed
from schemas.waits import Wait
from trainer.checkpoints.checkpoint import drop_old_checkpoints, row_ranges, write_rows, write_tensors
from trainer.group import ALONE, Group


class RowSnapshot:
    """Rows [0, n) of `tensors` [n, ...] as they are now.

    The thread that changes rows calls `keep` first; another reads ranges of rows, each once. Memory: a byte a row, the
    range that is being read, and the rows changed before the range that they are in was read.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        # Whether a row may be changed: it is kept, or has been read.
        self._free = np.zeros(len(next(iter(tensors.values()), ())), bool)
        self._kept: list[tuple[np.ndarray, dict[str, torch.Tensor]]] = []
        self._lock = threading.Lock()

    def keep(self, ids: np.ndarray) -> None:
        """Keep rows `ids` [C], which are about to change."""
        with self._lock:
            fresh = ids[~self._free[ids]]
            if not len(fresh):
                return
            self._free[fresh] = True
            rows = torch.from_numpy(fresh)
            kept = {name: value.index_select(0, rows.to(value.device)) for name, value in self._tensors.items()}
            self._kept.append((fresh, kept))

    def read(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Copy rows [start, stop) as they were; ranges are read in ascending order."""
        # Without the lock: a row that changes meanwhile has been kept before, and is put right below.
        copies = {name: value[start:stop].clone() for name, value in self._tensors.items()}
        with self._lock:
            left = []
            for ids, kept in self._kept:
                inside = np.flatnonzero((ids >= start) & (ids < stop))
                for name, rows in kept.items():
                    places = torch.from_numpy(ids[inside] - start).to(rows.device)
                    copies[name].index_copy_(0, places, rows[torch.from_numpy(inside).to(rows.device)])
                if (ids >= stop).any():
                    left.append((ids, kept))
            self._kept = left
            self._free[start:stop] = True
        return copies


Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint of global `step`, on one rank.

    `parts`: tensors that every rank has, by file; rank 0 writes them. `rows`: the tensors [n, ...] of the labels
    [first, first + n) of [0, `labels`) that this rank holds. `best`: the step whose checkpoint is not dropped.
    """

    step: int
    parts: Mapping[str, Tensors]
    rows: Tensors
    first: int
    labels: int
    state: Mapping[str, Any]
    parents: Mapping[str, str]
    best: int | None = None


class CheckpointWriter:
    """Writes one checkpoint at a time; the newest `keep` are kept.

    In the background it works on what was there when `save` was called: a copy of the parts, on rank 0, and a snapshot
    of the rows, for which the training calls `before_change`. Memory: the parts, a file of rows (FILE_BYTES), a byte a
    row, and the rows that change while it writes; never all rows. In the foreground it takes no copy of anything.
    Rank 0 holds the `claim` on the run.
    """

    def __init__(
        self,
        run: RunLayout,
        keep: int = 2,
        background: bool = True,
        group: Group = ALONE,
        claim: Claim | None = None,
    ) -> None:
        self._claim = claim or Unclaimed()
        self._run, self._keep, self._background = run, keep, background
        self._group = group.for_another_thread() if background else group
        self._thread: threading.Thread | None = None
        self._snapshot: RowSnapshot | None = None
        self._failed: BaseException | None = None

    def save(self, contents: Contents) -> None:
        """Begin to write a checkpoint, once the one before is there; all ranks call it. StorageError of either."""
        self.wait()
        if not self._background:
            self._write(contents, None)
            return
        self._snapshot = RowSnapshot(contents.rows)
        parts = {
            name: {key: value.detach().clone() for key, value in tensors.items()}
            for name, tensors in (contents.parts.items() if self._group.first else ())
        }
        copied = replace(contents, parts=parts)
        self._thread = threading.Thread(
            target=self._work, args=(copied, self._snapshot), name="extremis-checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def copies_rows(self) -> bool:
        """True where `before_change` has to hear of rows."""
        return self._snapshot is not None and self._thread is not None

    def before_change(self, ids: np.ndarray) -> None:
        """Keep rows `ids` [C], from this rank's first, before they change. Raises StorageError: writing failed."""
        if self._snapshot is None or self._thread is None:
            return
        if self._thread.is_alive():
            self._snapshot.keep(ids)
        else:
            self.wait()

    def wait(self) -> None:
        """Wait until what was begun is published. Raises StorageError; RankLostError."""
        self.close()
        self._thread = self._snapshot = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Wait for the thread, and raise nothing: an error may be on its way already."""
        if self._thread is not None:
            with Wait(f"a checkpoint of {self._run.root} to be written", until="it is there"):
                self._thread.join()

    def _work(self, contents: Contents, snapshot: RowSnapshot) -> None:
        try:
            self._write(contents, snapshot)
        except BaseException as error:
            self._failed = error

    def _write(self, contents: Contents, snapshot: RowSnapshot | None) -> None:
        url, group = self._run.checkpoint(contents.step), self._group
        if group.first:
            self._claim.require()
            # What a try before left: it may have been cut at other labels.
            unpublish(url)
            storage.remove(url, recursive=True)
        group.barrier()
        shards = [write_tensors(url, name, tensors) for name, tensors in contents.parts.items()] if group.first else []
        shards += self._write_rows(url, contents, snapshot)
        by_rank = group.gather_objects(shards)
        if group.first:
            manifest = Manifest(
                kind="checkpoint",
                shards=tuple(shard for part in by_rank for shard in part),  # those of rows by ascending label
                rows=contents.labels,
                id_range=(0, contents.labels),
                parameters=dict(contents.state),
                parents=dict(contents.parents),
            )
            self._claim.require()
            publish(url, manifest)
            drop_old_checkpoints(self._run, self._keep, contents.best)

    def _write_rows(self, url: str, contents: Contents, snapshot: RowSnapshot | None) -> list[Shard]:
        rows, first = contents.rows, contents.first
        count = len(next(iter(rows.values()), ()))  # none where labels are encoded
        row_bytes = sum(value[:1].numel() * value.element_size() for value in rows.values())
        shards = []
        for start, stop in row_ranges(first, first + count, row_bytes):
            part = slice(start - first, stop - first)
            values = (
                {name: value[part] for name, value in rows.items()}
                if snapshot is None
                else snapshot.read(part.start, part.stop)
            )
            shards.append(write_rows(url, start, values))
        return shards
