"""Checkpoints of a run, read and written.

`CheckpointWriter` writes in the background, file by file. `RowSnapshot` keeps the rows that training changes meanwhile.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from schemas import PAD, storage
from schemas.layout import RunLayout, list_numbers
from schemas.manifest import Manifest, Shard, describe_file, is_published, publish, read_shard, unpublish
from schemas.mapped import ScratchFile
from schemas.owners import Claim, Unclaimed
from schemas.storage import join
from schemas.table import Table
from schemas.waits import Wait
from trainer.device import CPU, AsyncCopy, copy_before_change, send
from trainer.group import ALONE, Group

FILE_BYTES = 1 << 28  # maximum bytes of vectors and optimizer state in a file
_VECTORS = "vectors-"
NEWEST = "newest"  # value of `step` for the newest checkpoint
Tensors = Mapping[str, torch.Tensor]
ReadRows = Callable[..., dict[str, torch.Tensor]]  # (start, stop, *names): rows by name; without names, all rows
Job = Callable[[ReadRows], object]
_ID = "row"  # name of the field with the row id in a record of the scratch file
_MAX_KEPT_BYTES, _MAX_KEPT_PIECES = 1 << 26, 1 << 10  # maximum bytes, and pieces, of kept rows in memory
_MAX_IN_FLIGHT = 2  # maximum number of pieces that a GPU is sending


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint; `state` is the state of the training loop."""

    table: Table

    @classmethod
    def open(cls, url: str) -> Checkpoint:
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


def latest_checkpoint(run: RunLayout) -> Checkpoint | None:
    """Open the newest finished checkpoint of a run; return None if no checkpoint is finished."""
    finished = (step for step in reversed(list_numbers(run.checkpoints)) if is_published(run.checkpoint(step)))
    newest = next(finished, None)
    return None if newest is None else Checkpoint.open(run.checkpoint(newest))


def open_step(run: RunLayout, step: int | str | None = None) -> Checkpoint | None:
    """Open the checkpoint of `step`, by default of `best_step`, or the NEWEST; None if there is no checkpoint."""
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


class BackgroundWriter:
    """Writes snapshots while training continues: a thread runs the jobs one after another.

    Jobs for the same step share one snapshot of the rows; training calls `before_change` before it changes rows. A job
    for a different step waits for all earlier jobs. If a job fails, later jobs are skipped and the next call raises the
    error. With `background=False`, a job runs at once and copies no rows.
    """

    def __init__(self, what: str, background: bool = True, group: Group = ALONE) -> None:
        self._what, self.background = what, background
        self.group = group.for_another_thread() if background else group
        self._thread: threading.Thread | None = None
        self._snapshot: RowSnapshot | None = None
        self._step = -1
        self._failed: BaseException | None = None
        self._seconds = 0.0

    def begin(self, step: int, rows: Tensors, job: Job) -> None:
        """Start `job` on this rank's `rows` [n, ...] after `step` steps, on all ranks. Raises an earlier error."""
        if not self.background:
            job(lambda start, stop, *names: {name: rows[name][start:stop] for name in names or rows})
            return
        if step != self._step:
            self.wait()
        read: ReadRows = lambda start, stop, *names: {}  # noqa: E731
        if rows:
            self._snapshot = self._snapshot or RowSnapshot(rows)
            read = self._snapshot.reader()
        self._step = step
        work = partial(self._work, job, read, self._thread)
        self._thread = threading.Thread(target=work, name="extremis-write", daemon=True)
        self._thread.start()

    @property
    def copies_rows(self) -> bool:
        """True if the caller must call `before_change` before it changes rows."""
        return self._thread is not None

    def before_change(self, ids: np.ndarray | torch.Tensor) -> None:
        """Save copies of the rows `ids` [C] before a change. Raises StorageError if writing failed.

        Ids count from this rank's first row; on a device, they may include padding.
        """
        if self._thread is None:
            return
        if not self._thread.is_alive():
            self.wait()
        elif self._snapshot is not None:
            self._snapshot.keep(ids)

    def wait(self) -> None:
        """Wait until all jobs are finished. Raises StorageError, RankLostError."""
        self.close()
        self._thread, self._snapshot, self._step = None, None, -1
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def check(self) -> None:
        """Raise the error if a job has failed, without waiting for other jobs."""
        if self._failed is not None:
            self.wait()

    def close(self) -> None:
        """Wait for the thread. Raises nothing, because an error may already be propagating."""
        if self._thread is not None:
            with Wait(f"{self._what} to be written", until="the files are written"):
                self._thread.join()

    def seconds(self) -> float:
        """Return the total seconds taken by the jobs that ended since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _work(self, job: Job, read: ReadRows, previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()
        if self._failed is not None:
            return
        began = time.perf_counter()
        try:
            job(read)
        except BaseException as error:
            self._failed = error
        self._seconds += time.perf_counter() - began


@dataclass(frozen=True)
class CheckpointContents:
    """Contents of the checkpoint of global step `step`, on one rank.

    `tensors`: tensors per file, which rank 0 writes. `rows`: tensors [n, ...] of labels [first, first + n) out of
    `labels`. `best`: the step of the best checkpoint, which is never removed.
    """

    step: int
    tensors: Mapping[str, Tensors]
    rows: Tensors
    first: int
    labels: int
    state: Mapping[str, Any]
    parents: Mapping[str, str]
    best: int | None = None


class CheckpointWriter(BackgroundWriter):
    """Writes one checkpoint at a time and retains the newest `keep` checkpoints.

    In the background, the state is that at the call of `save`: rank 0 copies the tensors, and each rank copies rows
    before they change. Memory: the tensors, a snapshot's memory and the rows of one file (FILE_BYTES), never all rows.
    """

    def __init__(
        self, run: RunLayout, keep: int = 2, background: bool = True, group: Group = ALONE, claim: Claim | None = None
    ) -> None:
        super().__init__(f"checkpoints and dumps of {run.root}", background, group)
        self._claim, self._run, self._keep = claim or Unclaimed(), run, keep

    def save(self, contents: CheckpointContents) -> None:
        """Start to write a checkpoint; all ranks call this. Raises the StorageError of this or an earlier one."""
        if not self.background:
            self.begin(contents.step, contents.rows, partial(self._write, contents))
            return
        if contents.step != self._step:
            self.wait()
        files = contents.tensors.items() if self.group.first else ()
        copies = {name: {key: copy_before_change(each.detach()) for key, each in file.items()} for name, file in files}

        def write(read: ReadRows) -> None:
            tensors = {name: {key: wait() for key, wait in waits.items()} for name, waits in copies.items()}
            self._write(replace(contents, tensors=tensors), read)

        self.begin(contents.step, contents.rows, write)

    def _write(self, contents: CheckpointContents, read: ReadRows) -> None:
        url, group = self._run.checkpoint(contents.step), self.group
        if group.first:
            self._claim.require()
            # An earlier attempt may have left files, with different label ranges.
            unpublish(url)
            storage.remove(url, recursive=True)
        group.barrier()
        files = contents.tensors.items() if group.first else ()
        shards = [write_tensors(url, name, tensors) for name, tensors in files]
        rows, first = contents.rows, contents.first
        count = len(next(iter(rows.values()), ()))  # none if labels are encoded
        row_bytes = sum(value[:1].numel() * value.element_size() for value in rows.values())
        shards += [
            write_rows(url, start, read(start - first, stop - first))
            for start, stop in row_ranges(first, first + count, row_bytes)
        ]
        by_rank = group.all_gather_objects(shards)
        if group.first:
            manifest = Manifest(
                kind="checkpoint",
                shards=tuple(shard for shards in by_rank for shard in shards),  # shards of rows are ascending by label
                rows=contents.labels,
                id_range=(0, contents.labels),
                parameters=dict(contents.state),
                parents=dict(contents.parents),
            )
            self._claim.require()
            publish(url, manifest)
            drop_old_checkpoints(self._run, self._keep, contents.best)


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


class _Piece(NamedTuple):
    """At most `size` saved rows; `take` returns the row ids [C] in ascending order, and the records [C] by name."""

    size: int
    take: Callable[[], tuple[np.ndarray, dict[str, np.ndarray]]]


class RowSnapshot:
    """Rows [0, n) of `tensors` [n, ...], with the values at the time of the snapshot.

    The thread that changes rows calls `keep` before each change; another thread reads the snapshot. Readers read one
    after another, each of them every range once, in any order. Memory: one byte per row, the range being read, and
    _MAX_KEPT_BYTES for rows that changed before the last reader had read them. Beyond this limit, rows go to a scratch
    file of at most n rows, in blocks.

    For rows on a GPU, the byte per row is there too, so the GPU selects the rows to save without the host. A separate
    stream copies them to pinned memory, and a thread writes them to the file; training waits only if too many are on
    the way.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, count = tensors, len(next(iter(tensors.values())))
        self._device = next(iter(tensors.values())).device
        sizes = {name: value[:1].numel() * value.element_size() for name, value in tensors.items()}
        self._record = np.dtype([(_ID, np.int64), *((name, f"V{size}") for name, size in sizes.items())])
        # True for a row that may change, because it is kept or all readers have read it. The last is for padding.
        self._free = torch.zeros(count + 1, dtype=torch.bool, device=self._device)
        self._readers, self._unread, self._held = 0, count, 0
        self._kept: deque[_Piece] = deque()
        self._file_writer: ThreadPoolExecutor | None = None
        self._file_writes: deque[Future[None]] = deque()
        # A block is a quarter of a checkpoint's file: first rows [blocks + 1], and the number of rows in the file.
        blocks = row_ranges(0, count, 4 * self._record.itemsize)
        self._edges = np.array([0, *(stop for _, stop in blocks)])
        self._filed = np.zeros(len(blocks), np.int64)
        self._file: ScratchFile | None = None
        self._lock = threading.Lock()

    def reader(self) -> ReadRows:
        """Add a reader and return its read function; all readers must be added before the first row changes."""
        with self._lock:
            self._readers += 1
            self._free.zero_()
            self._unread = len(self._free) - 1
        return partial(self._read, self._readers)

    def keep(self, ids: np.ndarray | torch.Tensor) -> None:
        """Save copies of the distinct rows `ids` [C], which are about to change. Raises StorageError without room."""
        with self._lock:
            piece = None
            if self._unread and len(ids):
                piece = self._piece_of_host(ids) if self._device == CPU else self._piece_of_device(ids)
            if piece is None:
                return
            self._kept.append(piece)
            self._held += piece.size
        if self._device == CPU:
            self._shrink()
            return
        self._file_writer = self._file_writer or ThreadPoolExecutor(1, thread_name_prefix="extremis-keep")
        self._file_writes.append(self._file_writer.submit(self._shrink))
        while len(self._file_writes) > _MAX_IN_FLIGHT:
            self._file_writes.popleft().result()

    def _piece_of_host(self, ids: np.ndarray | torch.Tensor) -> _Piece | None:
        assert isinstance(ids, np.ndarray)
        free = self._free.numpy()
        fresh = ids[~free[ids]]
        if not len(fresh):
            return None
        fresh.sort(kind="stable")  # ids consist of one or two ascending runs
        free[fresh] = True
        rows = {name: _records(value).take(fresh) for name, value in self._tensors.items()}
        return _Piece(len(fresh), lambda: (fresh, rows))

    def _piece_of_device(self, ids: np.ndarray | torch.Tensor) -> _Piece:
        """Start to copy rows `ids`; on the device, the id of a row that is already saved becomes padding."""
        sent: torch.Tensor = send(ids, self._device) if isinstance(ids, np.ndarray) else ids
        places = torch.where(sent < 0, len(self._free) - 1, sent).long()
        fresh = torch.where(self._free.index_select(0, places), PAD, places)
        self._free.index_fill_(0, places, True)
        places = sent.clamp(min=0)
        sent_ids = AsyncCopy(torch.where(sent < 0, PAD, fresh))
        rows = {
            name: AsyncCopy(value.index_select(0, places).reshape(len(sent), -1).view(torch.uint8))
            for name, value in self._tensors.items()
        }

        @functools.cache
        def take() -> tuple[np.ndarray, dict[str, np.ndarray]]:
            ids = sent_ids.take()
            order = np.argsort(ids, kind="stable")
            order = order[np.searchsorted(ids[order], 0) :]
            return ids[order], {name: _records(copy.wait())[order] for name, copy in rows.items()}

        return _Piece(len(sent), take)

    def _read(self, reader: int, start: int, stop: int, *names: str) -> dict[str, torch.Tensor]:
        # The copy needs no lock: a row that changes during the copy was kept before, and is corrected below.
        rows = {name: self._tensors[name][start:stop] for name in names or self._tensors}
        if next(iter(rows.values())).device.type == "cuda":
            copies = {name: copy.wait() for name, copy in [(name, AsyncCopy(value)) for name, value in rows.items()]}
        else:
            copies = {name: value.to("cpu", copy=True) for name, value in rows.items()}
        with self._lock:
            filed, held = self._filed.copy(), list(self._kept)
            if reader == self._readers:
                self._free[start:stop] = True
                self._unread -= stop - start
        for ids, kept in itertools.chain(self._filed_rows(filed, start, stop), (piece.take() for piece in held)):
            inside = np.flatnonzero((ids >= start) & (ids < stop))
            for name, value in copies.items():
                _records(value)[ids[inside] - start] = kept[name][inside]
        return copies

    def _shrink(self) -> None:
        """Write the pieces that exceed the limits to the file."""
        while True:
            with self._lock:
                pieces, size = len(self._kept), self._held * self._record.itemsize
                if pieces <= _MAX_IN_FLIGHT or (pieces <= _MAX_KEPT_PIECES and size <= _MAX_KEPT_BYTES):
                    return
                piece = self._kept[0]
            counts = self._write(*piece.take())
            with self._lock:  # the piece is dropped only now: if the disk is full, readers can continue
                self._filed += counts
                self._kept.popleft()
                self._held -= piece.size

    def _write(self, ids: np.ndarray, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """Append rows to their blocks in the file; return the number of rows added to each block."""
        self._file = self._file or ScratchFile("rows of labels that change while a dump or a checkpoint is written")
        records = np.empty(len(ids), self._record)
        records[_ID] = ids
        for name, column in rows.items():
            records[name] = column
        bounds = np.searchsorted(ids, self._edges)
        for block in np.flatnonzero(np.diff(bounds)):
            low, high = bounds[block : block + 2]
            place = int(self._edges[block] + self._filed[block]) * self._record.itemsize
            self._file.write_at(place, records[low:high].view(np.uint8).data)
        return np.diff(bounds)

    def _filed_rows(self, filed: np.ndarray, start: int, stop: int) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield ids and rows from the file for each block that overlaps [start, stop); `filed`: row counts."""
        for block in np.flatnonzero((self._edges[:-1] < stop) & (self._edges[1:] > start) & (filed > 0)):
            assert self._file is not None
            records = np.empty(filed[block], self._record)
            self._file.read_at(int(self._edges[block]) * self._record.itemsize, records.view(np.uint8).data)
            yield records[_ID], records


def _records(rows: torch.Tensor) -> np.ndarray:
    """View rows [C, ...] on the host as records [C] of bytes, so that NumPy copies each row as a whole."""
    values = rows.reshape(len(rows), -1).view(torch.uint8).numpy()
    return values.view(f"V{values.shape[1]}")[:, 0]
