"""Windows of the stream: the rows that a rank reads at once, stored by column, and the batches of these rows.

`decodings` yields a window's decoding, which any threads carry out; its result is a `Window`, which gathers batches.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numba
import numpy as np
import pyarrow as pa

from schemas.arrow import DENSE
from schemas.errors import TableError
from schemas.ragged import Ragged, offsets_of
from schemas.shard_files.parquet import list_column, matrix_column
from trainer.inputs import Inputs
from trainer.prefetch import prefetch
from trainer.stream.batch import Batch
from trainer.stream.order import EpochOrder, deal
from trainer.stream.row_groups import FILTERED, HARD, RowGroups

_AHEAD = 16  # rows prefetched from memory while another row is copied
_NEXT = np.uint64(1)
_BATCHES = 8  # batches gathered at a time: few calls, and the memory is reused while it is still in the cache
Damaged = Literal["stop", "skip"]


def decodings(
    order: EpochOrder, groups: RowGroups, streams: Sequence[int], first: int, fetched: int, damaged: Damaged
) -> Iterator[Decoding]:
    """Yield the decoding of each window of `streams` from number `first` on; the decodings complete in order.

    Row groups are requested `fetched` windows ahead. A row group that spans two windows is read once, for both.
    """
    buffers = Buffers()
    readings = _readings(order, streams, first)
    ahead: deque[tuple[list[int], set[int]]] = deque()
    coming = Decoding(order, groups, streams, first, buffers)
    for window in range(first, order.windows):
        for reading in readings:
            groups.request(reading[0])
            ahead.append(reading)
            if len(ahead) > fetched:
                break
        needed, shared = ahead.popleft()
        current = coming
        if window + 1 < order.windows:
            coming = Decoding(order, groups, streams, window + 1, buffers)
        for group in needed:
            windows = [current, coming] if group in shared else [current]
            current.tasks.append(functools.partial(_read, group, groups, windows, damaged))
        yield current


def _readings(order: EpochOrder, streams: Sequence[int], first: int) -> Iterator[tuple[list[int], set[int]]]:
    """Yield for each window from `first` on: the row groups to read, and the row groups that the next window shares."""

    def groups_of(window: int) -> set[int]:
        return {segment.group for stream in streams for segment in order.segments(stream, window)}

    before: set[int] = set()
    needed = groups_of(first)
    for window in range(first, order.windows):
        following = groups_of(window + 1) if window + 1 < order.windows else set()
        shared = (needed & following) - before
        yield sorted(needed - before, key=lambda group: (group not in shared, group)), shared
        before, needed = shared, following


def _read(group: int, groups: RowGroups, windows: Sequence[Decoding], damaged: Damaged) -> None:
    try:
        table = groups.read(group)
    except TableError:
        if damaged == "stop":
            raise
        return
    for window in windows:
        window.add(group, table)


class Decoding:
    """The decoding of window `window` of `streams`: run `tasks` in any threads, then call `result`.

    The rows [n] are the window's concatenated segments. Lists stay as they were read; matrices (`hard`) are copied.
    """

    def __init__(
        self, order: EpochOrder, groups: RowGroups, streams: Sequence[int], window: int, buffers: Buffers
    ) -> None:
        self._order, self._groups, self._streams, self._window, self._buffers = order, groups, streams, window, buffers
        self._segments = [segment for stream in streams for segment in order.segments(stream, window)]
        self._starts = np.cumsum([0, *(segment.stop - segment.start for segment in self._segments)])
        self._lists: list[pa.Table | None] = [None] * len(self._segments)
        self._matrices: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()
        self.tasks: list[Callable[[], None]] = [self._arrange]

    def _arrange(self) -> None:
        self._positions, self._offsets = deal([self._order.take(stream, self._window) for stream in self._streams])
        first_row = self._groups.first_row
        ids = [np.arange(s.start, s.stop) + first_row[s.group] for s in self._segments]
        self._rows = np.concatenate([np.empty(0, np.int64), *ids])[self._positions]

    def add(self, group: int, table: pa.Table) -> None:
        """Add row group `group` to all its segments. Thread-safe."""
        names = _matrices_of(table)
        with self._lock:
            if names and not self._matrices:
                self._matrices = self._lend(table, names, int(self._starts[-1]))
        matrices, table = {name: matrix_column(table, name) for name in names}, table.drop_columns(names)
        for number, segment in enumerate(self._segments):
            if segment.group == group:
                rows, start = segment.stop - segment.start, int(self._starts[number])
                self._lists[number] = table.slice(segment.start, rows)
                for name, values in matrices.items():
                    self._matrices[name][start : start + rows] = values[segment.start : segment.stop]

    def result(self) -> Window:
        """Return the window; no batch contains unread rows. Raises TableError if no row group can be decoded."""
        self.tasks.clear()  # tasks refer to this object: the cycle would keep the window until a garbage collection
        positions, rows, offsets, matrices = self._positions, self._rows, self._offsets, self._matrices
        sizes = np.diff(self._starts).tolist()
        missing = np.repeat([segment is None for segment in self._lists], sizes).astype(bool)
        like = next((segment for segment in self._lists if segment is not None), None)
        if like is None:  # fewer rows than streams, or all damaged: this rank takes as many steps as other ranks
            like = _read_no_rows(self._groups)
            names = _matrices_of(like)
            matrices, like = self._lend(like, names, 0), like.drop_columns(names)
            lists, positions, rows, offsets = [like], positions[:0], rows[:0], np.zeros_like(offsets)
        else:
            lists = [
                pa.table({field.name: pa.nulls(size, field.type) for field in like.schema})
                if segment is None
                else segment
                for segment, size in zip(self._lists, sizes, strict=True)
            ]
            if missing.any():
                kept = ~missing[positions]
                positions, rows, offsets = positions[kept], rows[kept], offsets_of(kept)[offsets]
        columns = {name: Ragged.join([list_column(each, name) for each in lists]) for name in like.column_names}
        place = self._order.epoch, self._window * self._order.steps_per_window
        return Window(*place, columns, matrices, self._buffers, positions, rows, offsets, int(missing.sum()))

    def _lend(self, table: pa.Table, names: list[str], rows: int) -> dict[str, np.ndarray]:
        return {name: self._buffers.take(rows, table.schema.field(name).type) for name in names}


def _matrices_of(table: pa.Table) -> list[str]:
    return [field.name for field in table.schema if pa.types.is_fixed_size_list(field.type)]


def _read_no_rows(groups: RowGroups) -> pa.Table:
    """Return an empty table with the columns of the row groups. Raises TableError if no row group can be decoded."""
    last = len(groups.group_rows) - 1
    for number in range(last):
        with contextlib.suppress(TableError):
            return groups.read(number).slice(0, 0)
    return groups.read(last).slice(0, 0)


@dataclass(frozen=True)
class Window:
    """Columns of a window in reading order: lists, and matrices [n, K] in memory from `buffers`.

    Batch i, of step `first_step` + i of `epoch`, takes rows `order[offsets[i]:offsets[i + 1]]`; `rows` contains the
    global row ids in `order`. `skipped` rows could not be decoded and are in no batch.
    """

    epoch: int
    first_step: int
    lists: dict[str, Ragged]
    matrices: dict[str, np.ndarray]
    buffers: Buffers
    order: np.ndarray
    rows: np.ndarray
    offsets: np.ndarray
    skipped: int = 0

    def close(self) -> None:
        """Return the memory to `buffers`; no more batches may be requested."""
        for values in self.matrices.values():
            self.buffers.give(values)

    def split(self, steps: range) -> list[range]:
        """Return the `steps` (ascending) that are in this window, a few at a time."""
        skipped = max(0, -(-(self.first_step - steps.start) // steps.step))
        stop = min(self.first_step + len(self.offsets) - 1, steps.stop)
        within = range(steps.start + skipped * steps.step, stop, steps.step)
        return [within[first : first + _BATCHES] for first in range(0, len(within), _BATCHES)]

    def batches(self, steps: range) -> list[Batch]:
        """Gather the batches of `steps` together."""
        numbers = np.asarray(steps) - self.first_step
        low, high = self.offsets[numbers], self.offsets[numbers + 1]
        if steps.step == 1:
            order, rows = self.order[low[0] : high[-1]], self.rows[low[0] : high[-1]]
        else:
            picked = [slice(*bounds) for bounds in zip(low, high, strict=True)]
            order, rows = (np.concatenate([column[part] for part in picked]) for column in (self.order, self.rows))
        bounds = offsets_of(high - low)
        matrices = {name: values.take(order, axis=0) for name, values in self.matrices.items()}
        columns = {name: take_batches(column, order, bounds) for name, column in self.lists.items()}
        batches, bounds = [], bounds.tolist()
        for step, begin, end, *lists in zip(steps, bounds[:-1], bounds[1:], *columns.values(), strict=True):
            by_name = dict(zip(columns, lists, strict=True))
            labels, own = by_name["label_ids"], {name: values[begin:end] for name, values in matrices.items()}
            inputs = Inputs.from_columns(by_name, own.get(DENSE))
            columns_of = rows[begin:end], inputs, labels.values, labels.offsets, own.get(HARD)
            batches.append(Batch(self.epoch, step, *columns_of, filtered=by_name.get(FILTERED)))
        return batches


class Buffers:
    """Memory that windows reuse, because allocating new pages takes as long as filling them. Thread-safe."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}  # by the bytes of a row
        self._lock = threading.Lock()

    def take(self, rows: int, type: pa.FixedSizeListType) -> np.ndarray:
        """Return uninitialised memory for `rows` rows of a fixed-size list column [n, K], to `give` back after use."""
        dtype = pa.array([], type.value_type).to_numpy().dtype
        width = type.list_size * dtype.itemsize
        size = rows * width
        with self._lock:
            free = self._free.setdefault(width, [])
            number = next((n for n, buffer in enumerate(free) if len(buffer) >= size), None)
            if number is None:
                free.clear()  # too small for the current windows
            memory = np.empty(size, np.uint8) if number is None else free.pop(number)
        return memory[:size].view(dtype).reshape(rows, type.list_size)

    def give(self, values: np.ndarray) -> None:
        """Make memory from `take` available again; no reference to the memory may remain."""
        memory = values.base
        assert isinstance(memory, np.ndarray), "lent values are a view of a whole buffer"
        with self._lock:
            self._free.setdefault(values.shape[1] * values.itemsize, []).append(memory)


def take_batches(column: Ragged, rows: np.ndarray, bounds: np.ndarray) -> list[Ragged]:
    """Return the rows `rows[bounds[i] : bounds[i + 1]]` of each batch i in [0, b); `bounds` [b + 1] starts at 0."""
    ends, stops = np.empty(len(rows) + len(bounds) - 1, np.int64), np.empty(len(bounds), np.int64)
    values = np.empty(_find_rows(column.offsets, rows, bounds, ends, stops), column.values.dtype)
    _copy_rows(column.values, column.offsets, rows, values)
    parts = zip(itertools.pairwise(stops.tolist()), itertools.pairwise(bounds.tolist()), strict=True)
    return [
        Ragged(values[low:high], ends[batch + start : batch + stop + 1])
        for batch, ((low, high), (start, stop)) in enumerate(parts)
    ]


@numba.njit(nogil=True, cache=True)
def _find_rows(offsets, rows, bounds, ends, stops):  # type: ignore[no-untyped-def]
    """Write the offsets of each batch and the end of its values; return the number of values."""
    size = 0
    stops[0] = 0
    for batch in range(len(bounds) - 1):
        ends[bounds[batch] + batch] = 0
        for i in range(bounds[batch], bounds[batch + 1]):
            row = np.uint64(rows[i])  # unsigned: avoids the test for an index below 0
            size += offsets[row + _NEXT] - offsets[row]
            ends[i + batch + 1] = size - stops[batch]
        stops[batch + 1] = size
    return size


@numba.njit(nogil=True, cache=True)
def _copy_rows(values, offsets, rows, into):  # type: ignore[no-untyped-def]
    begin, end = np.intp(values.ctypes.data), np.uint64(0)
    for number in range(len(rows)):
        ahead = rows[min(number + _AHEAD, len(rows) - 1)]
        prefetch(begin + offsets[ahead] * values.itemsize)
        row = np.uint64(rows[number])
        for i in range(np.uint64(offsets[row]), np.uint64(offsets[row + _NEXT])):
            into[end] = values[i]
            end += _NEXT
