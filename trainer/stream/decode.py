"""Decoding of a rank's windows: each row group is read once, and damaged ones may be left out."""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from schemas.errors import TableError
from schemas.ragged import offsets_of
from trainer.stream.order import EpochOrder, Segment, deal
from trainer.stream.row_groups import RowGroups
from trainer.stream.window import Buffers, Lists, Matrix, Window

HARD = "hard"


class WindowBuilder:
    """Rows of `segments` laid end to end, [n]. Lists that are added are held; hard negatives are copied."""

    def __init__(self, segments: Sequence[Segment], buffers: Buffers) -> None:
        self._segments, self._buffers = segments, buffers
        self._starts = np.cumsum([0, *(segment.stop - segment.start for segment in segments)])
        self._lists: list[pa.Table | None] = [None] * len(segments)
        self._hard: Matrix | None = None
        self._lock = threading.Lock()

    def add(self, group: int, table: pa.Table) -> None:
        """Add row group `group` wherever there are segments of it. Safe to call from several threads."""
        if HARD in table.column_names:
            with self._lock:
                if self._hard is None:
                    self._hard = Matrix.lent(int(self._starts[-1]), table.schema.field(HARD).type, self._buffers)
            hard, table = table.select([HARD]), table.drop_columns(HARD)
        for number, segment in enumerate(self._segments):
            if segment.group == group:
                rows = segment.stop - segment.start
                self._lists[number] = table.slice(segment.start, rows)
                if self._hard is not None:
                    self._hard.write(hard.slice(segment.start, rows), HARD, int(self._starts[number]))

    @property
    def missing(self) -> np.ndarray:
        """Rows that were not added, bool [n]."""
        return np.repeat([segment is None for segment in self._lists], np.diff(self._starts)).astype(bool)

    def build(self, order: np.ndarray, rows: np.ndarray, offsets: np.ndarray) -> Window:
        """Return the window whose batches take rows `order`, none of them missing. Raises ValueError where all are."""
        like = next((segment for segment in self._lists if segment is not None), None)
        if like is None:
            raise ValueError("a window of nothing")
        lists = [
            _blank(like.schema, int(size)) if segment is None else segment
            for segment, size in zip(self._lists, np.diff(self._starts), strict=True)
        ]
        columns = {name: Lists.of(lists, name) for name in like.column_names}
        return Window(columns, self._hard, order, rows, offsets, int(self.missing.sum()))


def _blank(schema: pa.Schema, rows: int) -> pa.Table:
    """Return `rows` rows of empty lists."""
    return pa.table({field.name: pa.nulls(rows, field.type) for field in schema})


Damaged = Literal["stop", "skip"]
Task: TypeAlias = Callable[[], None]


class Decoding:
    """Window number `window` of `streams`, to be decoded: when `tasks` are done, in any threads, `result` is there."""

    def __init__(
        self, order: EpochOrder, groups: RowGroups, streams: Sequence[int], window: int, buffers: Buffers
    ) -> None:
        self._order, self._groups, self._streams, self._window, self._buffers = order, groups, streams, window, buffers
        self._segments = [segment for stream in streams for segment in order.segments(stream, window)]
        self.builder = WindowBuilder(self._segments, buffers)
        self.tasks: list[Task] = [self._arrange]

    def _arrange(self) -> None:
        """Order the rows batch by batch, and find where each batch ends."""
        self._positions, self._offsets = deal([self._order.take(stream, self._window) for stream in self._streams])
        first_row = self._groups.first_row
        ids = [np.arange(s.start, s.stop) + first_row[s.group] for s in self._segments]
        self._rows = np.concatenate([np.empty(0, np.int64), *ids])[self._positions]

    def result(self) -> Window:
        """Return the window; rows that were not read are in no batch. Raises TableError where no row group decodes."""
        self.tasks.clear()  # one is a method of this: a ring would keep the window until a collection
        positions, rows, offsets = self._positions, self._rows, self._offsets
        missing = self.builder.missing
        if missing.all():  # fewer rows than streams, or all damaged: as many steps as the other ranks all the same
            empty = WindowBuilder([Segment(0, 0, 0)], self._buffers)
            empty.add(0, _read_no_rows(self._groups))
            return replace(empty.build(positions[:0], rows[:0], np.zeros_like(offsets)), skipped=len(missing))
        if missing.any():
            kept = ~missing[positions]
            positions, rows, offsets = positions[kept], rows[kept], offsets_of(kept)[offsets]
        return self.builder.build(positions, rows, offsets)


def decodings(
    order: EpochOrder, groups: RowGroups, streams: Sequence[int], first: int, fetched: int, damaged: Damaged
) -> Iterator[Decoding]:
    """Yield the decoding of each window of `streams` from number `first` on; they are done in order.

    Row groups are asked for `fetched` windows ahead. One that a window's end cuts is read once, for both windows.
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
            builders = [current.builder, coming.builder] if group in shared else [current.builder]
            current.tasks.append(functools.partial(_read, group, groups, builders, damaged))
        yield current


def _readings(order: EpochOrder, streams: Sequence[int], first: int) -> Iterator[tuple[list[int], set[int]]]:
    """Yield for each window from `first` on the row groups to read, and those that the next window needs too."""
    before: set[int] = set()
    for window in range(first, order.windows):
        by_stream = [order.segments(stream, window) for stream in streams]
        needed = {segment.group for segments in by_stream for segment in segments}
        cut = [] if window + 1 == order.windows else [segments[-1] for segments in by_stream if segments]
        shared = {segment.group for segment in cut if segment.stop < order.group_rows[segment.group]} - before
        yield sorted(needed - before, key=lambda group: (group not in shared, group)), shared
        before = shared


def _read(group: int, groups: RowGroups, builders: Sequence[WindowBuilder], damaged: Damaged) -> None:
    """Read a row group and add it where it is needed. Raises TableError unless damaged ones are to be skipped."""
    try:
        table = groups.read(group)
    except TableError:
        if damaged == "stop":
            raise
        return
    for builder in builders:
        builder.add(group, table)


def _read_no_rows(groups: RowGroups) -> pa.Table:
    """Return no rows, with the columns of all row groups. Raises TableError where no row group decodes."""
    last = len(groups.group_rows) - 1
    for number in range(last):
        with contextlib.suppress(TableError):
            return groups.read(number).slice(0, 0)
    return groups.read(last).slice(0, 0)
