"""Decoding of a rank's windows: each row group is read once, and damaged row groups may be skipped."""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from schemas.errors import TableError
from schemas.ragged import Ragged, offsets_of
from schemas.shard_files.parquet import list_column, matrix_column
from trainer.stream.order import EpochOrder, deal
from trainer.stream.row_groups import RowGroups
from trainer.stream.window import Buffers, Window

Damaged = Literal["stop", "skip"]
Task: TypeAlias = Callable[[], None]


class Decoding:
    """The decoding of window `window` of `streams`: run `tasks` in any threads, then call `result`.

    The rows [n] of the window are its concatenated segments. Lists stay as they were read from a row group; matrices,
    such as hard negatives, are copied.
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
        self.tasks: list[Task] = [self._arrange]

    def _arrange(self) -> None:
        """Order the rows by batch, and find the end of each batch."""
        self._positions, self._offsets = deal([self._order.take(stream, self._window) for stream in self._streams])
        first_row = self._groups.first_row
        ids = [np.arange(s.start, s.stop) + first_row[s.group] for s in self._segments]
        self._rows = np.concatenate([np.empty(0, np.int64), *ids])[self._positions]

    def add(self, group: int, table: pa.Table) -> None:
        """Add row group `group` to all its segments. Thread-safe."""
        if names := _matrices_of(table):
            with self._lock:
                if not self._matrices:
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
        sizes = np.diff(self._starts)
        missing = np.repeat([segment is None for segment in self._lists], sizes).astype(bool)
        like = next((segment for segment in self._lists if segment is not None), None)
        if like is None:  # fewer rows than streams, or all damaged: this rank takes as many steps as other ranks
            like = _read_no_rows(self._groups)
            names = _matrices_of(like)
            matrices, like = self._lend(like, names, 0), like.drop_columns(names)
            lists, positions, rows, offsets = [like], positions[:0], rows[:0], np.zeros_like(offsets)
        else:
            lists = [
                _blank(like.schema, int(size)) if segment is None else segment
                for segment, size in zip(self._lists, sizes, strict=True)
            ]
            if missing.any():
                kept = ~missing[positions]
                positions, rows, offsets = positions[kept], rows[kept], offsets_of(kept)[offsets]
        columns = {name: Ragged.join([list_column(each, name) for each in lists]) for name in like.column_names}
        return Window(columns, matrices, self._buffers, positions, rows, offsets, int(missing.sum()))

    def _lend(self, table: pa.Table, names: list[str], rows: int) -> dict[str, np.ndarray]:
        return {name: self._buffers.take(rows, table.schema.field(name).type) for name in names}


def _matrices_of(table: pa.Table) -> list[str]:
    return [field.name for field in table.schema if pa.types.is_fixed_size_list(field.type)]


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
    """Read a row group and add it to `windows`. Raises TableError, unless damaged row groups are skipped."""
    try:
        table = groups.read(group)
    except TableError:
        if damaged == "stop":
            raise
        return
    for window in windows:
        window.add(group, table)


def _blank(schema: pa.Schema, rows: int) -> pa.Table:
    """Return `rows` rows of empty lists."""
    return pa.table({field.name: pa.nulls(rows, field.type) for field in schema})


def _read_no_rows(groups: RowGroups) -> pa.Table:
    """Return an empty table with the columns of the row groups. Raises TableError if no row group can be decoded."""
    last = len(groups.group_rows) - 1
    for number in range(last):
        with contextlib.suppress(TableError):
            return groups.read(number).slice(0, 0)
    return groups.read(last).slice(0, 0)
