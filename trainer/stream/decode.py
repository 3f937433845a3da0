"""Windows of a rank: which row groups they need, read once each, damaged ones left out where that is asked for."""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from schemas.errors import TableError
from schemas.ragged import offsets_of
from trainer.stream.columns import Buffers
from trainer.stream.order import EpochOrder, Segment, deal
from trainer.stream.source import RowGroups
from trainer.stream.window import Window
from trainer.stream.window_builder import Parts

Damaged = Literal["stop", "skip"]
Task: TypeAlias = Callable[[], None]


class Decoding:
    """Window number `window` of `streams`, to be decoded: when `tasks` are done, in any threads, `result` is there."""

    def __init__(
        self, order: EpochOrder, groups: RowGroups, streams: Sequence[int], window: int, buffers: Buffers
    ) -> None:
        self._order, self._groups, self._streams, self._window, self._buffers = order, groups, streams, window, buffers
        self._segments = [segment for stream in streams for segment in order.segments(stream, window)]
        self.parts = Parts(self._segments, buffers)
        self.tasks: list[Task] = [self._arrange]

    def _arrange(self) -> None:
        """Which rows the batches take, batch by batch, and where each batch ends."""
        taken = [self._order.take(stream, self._window) for stream in self._streams]
        self._taken, self._offsets = deal(taken)
        first_row = self._groups.first_row
        ids = [np.arange(s.start, s.stop) + first_row[s.group] for s in self._segments]
        self._rows = np.concatenate([np.empty(0, np.int64), *ids])[self._taken]

    def result(self) -> Window:
        """Rows that were not read are in no batch. Raises TableError where not a single row group decodes."""
        self.tasks.clear()  # one is a method of this: a ring would keep the window until a collection
        taken, rows, offsets = self._taken, self._rows, self._offsets
        missing = self.parts.missing
        if missing.all():  # fewer rows than streams, or all damaged: as many steps as the other ranks all the same
            nothing = Parts([Segment(0, 0, 0)], self._buffers)
            nothing.add(0, _none(self._groups))
            return replace(nothing.window(taken[:0], rows[:0], np.zeros_like(offsets)), skipped=len(missing))
        if missing.any():
            kept = ~missing[taken]
            taken, rows, offsets = taken[kept], rows[kept], offsets_of(kept)[offsets]
        return self.parts.window(taken, rows, offsets)


def decodings(
    order: EpochOrder, groups: RowGroups, streams: Sequence[int], first: int, fetched: int, damaged: Damaged
) -> Iterator[Decoding]:
    """How to decode each window of `streams` from number `first` on; to be done in order.

    Row groups are asked for `fetched` windows ahead. One that a window's end cuts is read once, for both windows.
    """
    buffers = Buffers()
    readings = _readings(order, streams, first)
    ahead: deque[tuple[list[int], set[int]]] = deque()
    coming = Decoding(order, groups, streams, first, buffers)
    for window in range(first, order.windows):
        for reading in readings:
            groups.ahead(reading[0])
            ahead.append(reading)
            if len(ahead) > fetched:
                break
        own, shared = ahead.popleft()
        current = coming
        if window + 1 < order.windows:
            coming = Decoding(order, groups, streams, window + 1, buffers)
        for group in own:
            parts = [current.parts, coming.parts] if group in shared else [current.parts]
            current.tasks.append(functools.partial(_read, group, groups, parts, damaged))
        yield current


def _readings(order: EpochOrder, streams: Sequence[int], first: int) -> Iterator[tuple[list[int], set[int]]]:
    """For each window from `first` on: the row groups to read for it, and those of them that the next one needs."""
    before: set[int] = set()
    for window in range(first, order.windows):
        segments = [order.segments(stream, window) for stream in streams]
        needed = {segment.group for some in segments for segment in some}
        last = window + 1 == order.windows
        shared = {some[-1].group for some in segments if some and not last and order.goes_on(some[-1])} - before
        yield sorted(needed - before, key=lambda group: (group not in shared, group)), shared
        before = shared


def _read(group: int, groups: RowGroups, parts: Sequence[Parts], damaged: Damaged) -> None:
    """Read a row group and put it where it is needed. Raises TableError unless damaged ones are to be skipped."""
    try:
        table = groups.read(group)
    except TableError:
        if damaged == "stop":
            raise
        return
    for some in parts:
        some.add(group, table)


def _none(groups: RowGroups) -> pa.Table:
    """No rows, in the columns that there would be. Raises TableError where not a single row group decodes."""
    number = 0
    while True:
        try:
            return groups.read(number).slice(0, 0)
        except TableError:
            number += 1
            if number == len(groups.group_rows):
                raise
