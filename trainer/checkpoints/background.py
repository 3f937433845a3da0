"""Writes in the background while the training goes on to change rows of labels: a thread, and rows as they were."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from schemas.mapped import ScratchFile
from schemas.waits import Wait
from trainer.checkpoints.checkpoint import row_ranges
from trainer.device import CPU
from trainer.group import ALONE, Group
from trainer.stream.transfer import LateCopy

Tensors = Mapping[str, torch.Tensor]
ReadRows = Callable[..., dict[str, torch.Tensor]]  # (start, stop, *names): rows by name as they were; no names: all
Job = Callable[[ReadRows], object]
_ID = "row"  # of a record in the scratch file, beside the tensors' names
_HELD_BYTES, _HELD = 1 << 26, 1 << 10  # of kept rows in memory, and pieces of them
_BEHIND = 2  # pieces on their way from a GPU


class RowSnapshot:
    """Rows [0, n) of `tensors` [n, ...] as they are now.

    The thread that changes rows calls `keep` first; another reads. Of several readers each reads after those before it,
    ranges in any order, each once. Memory: a byte a row, the range that is being read, and _HELD_BYTES of rows that
    changed before the last reader came to them; the others are in a scratch file of n rows at most, block by block.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, count = tensors, len(next(iter(tensors.values())))
        sizes = {name: value[:1].numel() * value.element_size() for name, value in tensors.items()}
        self._record = np.dtype([(_ID, np.int64), *((name, f"V{size}") for name, size in sizes.items())])
        # Whether a row may be changed: it is kept, or all have read it.
        self._free = np.zeros(count, bool)
        self._readers, self._held = 0, 0
        # Ids [C] of each piece, and what returns its rows by name as records [C], once they have come from a GPU.
        self._kept: deque[tuple[np.ndarray, dict[str, Callable[[], np.ndarray]]]] = deque()
        # Blocks of a quarter of a checkpoint's file: [blocks + 1] first rows, and how many of each are in the file.
        blocks = row_ranges(0, count, 4 * self._record.itemsize)
        self._edges = np.array([0, *(stop for _, stop in blocks)])
        self._filed = np.zeros(len(blocks), np.int64)
        self._file: ScratchFile | None = None
        self._lock = threading.Lock()

    def reader(self) -> ReadRows:
        """Return what one more reader reads by; all readers are there before the first row changes."""
        with self._lock:
            self._readers += 1
            self._free[:] = False
        return partial(self._read, self._readers)

    def keep(self, ids: np.ndarray) -> None:
        """Keep rows `ids` [C], which are about to change. Raises StorageError: no room for a scratch file."""
        with self._lock:
            fresh = ids[~self._free[ids]]
            if not len(fresh):
                return
            fresh.sort(kind="stable")  # ids are one ascending run, or two
            self._free[fresh] = True
            self._kept.append((fresh, {name: _copy_rows(value, fresh) for name, value in self._tensors.items()}))
            self._held += len(fresh)
            while len(self._kept) > _BEHIND and (
                self._held * self._record.itemsize > _HELD_BYTES or len(self._kept) > _HELD
            ):
                self._write(*self._kept[0])  # before it is dropped: where there is no room, readers go on
                self._held -= len(self._kept.popleft()[0])

    def _read(self, reader: int, start: int, stop: int, *names: str) -> dict[str, torch.Tensor]:
        """Copy rows [start, stop) as they were, to the host."""
        # Without the lock: a row that changes meanwhile has been kept before, and is put right below.
        copies = {name: self._tensors[name][start:stop].to(CPU, copy=True) for name in names or self._tensors}
        with self._lock:
            filed, held = self._filed.copy(), list(self._kept)
            if reader == self._readers:
                self._free[start:stop] = True
        in_memory = ((ids, {name: rows[name]() for name in copies}) for ids, rows in held)
        for ids, rows in itertools.chain(self._filed_rows(filed, start, stop), in_memory):
            inside = np.flatnonzero((ids >= start) & (ids < stop))
            for name, value in copies.items():
                _records(value)[ids[inside] - start] = rows[name][inside]
        return copies

    def _write(self, ids: np.ndarray, rows: Mapping[str, Callable[[], np.ndarray]]) -> None:
        """Append rows to those of their blocks in the file."""
        self._file = self._file or ScratchFile("rows of labels that change while a dump or a checkpoint is written")
        records = np.empty(len(ids), self._record)
        records[_ID] = ids
        for name, column in rows.items():
            records[name] = column()
        bounds = np.searchsorted(ids, self._edges)
        for block in np.flatnonzero(np.diff(bounds)):
            low, high = bounds[block : block + 2]
            place = int(self._edges[block] + self._filed[block]) * self._record.itemsize
            self._file.write_at(place, records[low:high].view(np.uint8).data)
            self._filed[block] += high - low

    def _filed_rows(self, filed: np.ndarray, start: int, stop: int) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield ids and rows from the file, of the blocks that [start, stop) lies in; it has `filed` rows of each."""
        for block in np.flatnonzero((self._edges[:-1] < stop) & (self._edges[1:] > start) & (filed > 0)):
            assert self._file is not None
            records = np.empty(filed[block], self._record)
            self._file.read_at(int(self._edges[block]) * self._record.itemsize, records.view(np.uint8).data)
            yield records[_ID], records


class BackgroundWriter:
    """Writes what is there now while training goes on: one job after the other, in a thread, in the order they came in.

    Jobs of the same step share one snapshot of the rows, for which the training calls `before_change`; a job of another
    step waits for all before. Where a job fails those after it are left out, and the next call raises its error. In the
    foreground a job is done at once, and nothing is copied.
    """

    def __init__(self, what: str, background: bool = True, group: Group = ALONE) -> None:
        self._what, self.background = what, background
        self.group = group.for_another_thread() if background else group  # for the messages of jobs
        self._thread: threading.Thread | None = None
        self._snapshot: RowSnapshot | None = None
        self._step = -1
        self._failed: BaseException | None = None
        self._seconds = 0.0

    def begin(self, step: int, rows: Tensors, job: Job) -> None:
        """Begin `job` on `rows` [n, ...] of this rank as they are after `step` of the run; all ranks do alike.

        Raises StorageError or RankLostError of a job before; in the foreground of this one.
        """
        if not self.background:
            job(lambda start, stop, *names: {name: rows[name][start:stop] for name in names or rows})
            return
        self.wait_for_other_steps(step)
        read: ReadRows = lambda start, stop, *names: {}  # noqa: E731
        if rows:
            self._snapshot = self._snapshot or RowSnapshot(rows)
            read = self._snapshot.reader()
        self._step = step
        work = partial(self._work, job, read, self._thread)
        self._thread = threading.Thread(target=work, name="extremis-write", daemon=True)
        self._thread.start()

    def wait_for_other_steps(self, step: int) -> None:
        """Wait for what was begun at another step than `step`. Raises StorageError; RankLostError."""
        if step != self._step:
            self.wait()

    @property
    def copies_rows(self) -> bool:
        """True where `before_change` has to hear of rows."""
        return self._thread is not None

    def before_change(self, ids: np.ndarray) -> None:
        """Keep rows `ids` [C], from this rank's first, before they change. Raises StorageError: writing failed."""
        if self._thread is None:
            return
        if not self._thread.is_alive():
            self.wait()
        elif self._snapshot is not None:
            self._snapshot.keep(ids)

    def wait(self) -> None:
        """Wait until what was begun is published. Raises StorageError; RankLostError."""
        self.close()
        self._thread, self._snapshot, self._step = None, None, -1
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def check(self) -> None:
        """Raise the error of a job that failed. Does not wait for others."""
        if self._failed is not None:
            self.wait()

    def close(self) -> None:
        """Wait for the thread, and raise nothing: an error may be on its way already."""
        if self._thread is not None:
            with Wait(f"{self._what} to be written", until="they are there"):
                self._thread.join()

    def seconds(self) -> float:
        """Return the seconds of the jobs that have ended since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _work(self, job: Job, read: ReadRows, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        if self._failed is not None:
            return
        began = time.perf_counter()
        try:
            job(read)
        except BaseException as error:
            self._failed = error
        self._seconds += time.perf_counter() - began


def _copy_rows(value: torch.Tensor, ids: np.ndarray) -> Callable[[], np.ndarray]:
    """Copy rows `ids` [C] of a tensor; return what waits for the copy and returns it as records."""
    if value.device == CPU:
        copied = _records(value).take(ids)
        return lambda: copied
    rows = value.index_select(0, torch.from_numpy(ids).to(value.device))
    late = LateCopy(rows.reshape(len(ids), -1).view(torch.uint8))
    return lambda: _records(torch.from_numpy(late.take()))


def _records(rows: torch.Tensor) -> np.ndarray:
    """View rows [C, ...] on the host as records [C] of bytes, which NumPy copies whole."""
    values = rows.reshape(len(rows), -1).view(torch.uint8).numpy()
    return values.view(f"V{values.shape[1]}")[:, 0]
