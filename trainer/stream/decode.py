"""Windows of a rank: which row groups they need, read once each, damaged ones left out where that is asked for."""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from schemas.errors import TableError
from trainer.stream.gather import Buffers
from trainer.stream.order import EpochOrder, Segment, deal
from trainer.stream.parts import Parts
from trainer.stream.source import RowGroups
from trainer.stream.window import Window

Damaged = Literal["stop", "skip"]
Groups: TypeAlias = dict[int, "Future[pa.Table | None]"]


def decodings(
    order: EpochOrder, groups: RowGroups, streams: range, first: int, fetched: int, damaged: Damaged
) -> Iterator[Callable[[], Window]]:
    """How to decode each window of `streams` from number `first` on, in order; any threads may do it, begun in order.

    Row groups are asked for `fetched` windows ahead. One that a window's end cuts is read once and handed on to the
    next window of the same stream.
    """
    inherited: Groups = {}
    buffers = Buffers()
    asked = first
    for window in range(first, order.windows):
        for coming in range(asked, min(window + 1 + fetched, order.windows)):
            needed = {segment.group for stream in streams for segment in order.segments(stream, coming)}
            groups.ahead(sorted(needed - (_handed_on(order, streams, coming - 1) if coming > first else set())))
            asked = coming + 1
        handed_on: Groups = {group: Future() for group in _handed_on(order, streams, window)}
        yield functools.partial(decode, order, groups, streams, window, inherited, handed_on, buffers, damaged)
        inherited = handed_on


def _handed_on(order: EpochOrder, streams: range, window: int) -> set[int]:
    """Row groups that go on after this window, in the next one of the same stream."""
    ends = (order.segments(stream, window)[-1:] for stream in streams)
    return {segment.group for end in ends for segment in end if order.goes_on(segment)}


def decode(
    order: EpochOrder,
    groups: RowGroups,
    streams: range,
    window: int,
    inherited: Groups,
    handed_on: Groups,
    buffers: Buffers,
    damaged: Damaged = "stop",
) -> Window:
    """Window number `window` of `streams`. Raises TableError unless `damaged` row groups are to be skipped."""
    segments: list[Segment] = []
    places: list[np.ndarray] = []
    sizes: list[int] = []
    for stream in streams:
        segments += order.segments(stream, window)
        shuffle = order.shuffle(stream, window)
        places.append(shuffle + sum(sizes))
        sizes.append(len(shuffle))
    batches = min(order.steps_per_window, order.steps - window * order.steps_per_window)
    dealt, offsets = deal(sizes, order.share, batches)
    taken = np.concatenate(places)[dealt]
    ids = [np.arange(s.start, s.stop) + groups.first_row[s.group] for s in segments] or [np.empty(0, np.int64)]
    rows = np.concatenate(ids)[taken]
    parts = Parts(segments, buffers)
    _read(parts, {segment.group for segment in segments}, groups, inherited, handed_on, damaged)
    missing = parts.missing
    if missing.all():  # fewer rows than streams, or all damaged: as many steps as the other ranks all the same
        nothing = Parts([Segment(0, 0, 0)], buffers)
        nothing.add(0, _none(groups))
        return replace(nothing.window(taken[:0], rows[:0], np.zeros_like(offsets)), skipped=len(missing))
    if missing.any():
        kept = ~missing[taken]
        taken, rows, offsets = taken[kept], rows[kept], np.concatenate([[0], np.cumsum(kept)])[offsets]
    return parts.window(taken, rows, offsets)


def _read(
    parts: Parts, wanted: set[int], groups: RowGroups, inherited: Groups, handed_on: Groups, damaged: Damaged
) -> None:
    """Add row groups `wanted` to `parts`, but for the damaged ones that are to be skipped."""
    try:
        # The next window waits for what is handed on, and this one for what it inherits.
        for group in sorted(wanted, key=lambda g: (g in inherited, g not in handed_on, g)):
            try:
                table = inherited[group].result() if group in inherited else groups.read(group)
            except TableError:
                if damaged == "stop":
                    raise
                table = None
            if group in handed_on:
                handed_on[group].set_result(table)
            if table is not None:
                parts.add(group, table)
    except BaseException as error:
        for future in handed_on.values():
            if not future.done():
                future.set_exception(error)
        raise


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
