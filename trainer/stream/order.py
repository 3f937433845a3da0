"""Order of rows: computed from row-group sizes alone, without reading any file.

Row groups, each once or as often as the weight of its source specifies, are permuted by (seed, epoch). The permuted
sequence of N rows is cut into S equal ranges, the streams. Each stream permutes rows inside windows of a few row
groups. Global batch t takes rows [t * B/S, (t + 1) * B/S) of every stream. S is fixed for a run and each rank has some
of the streams, so the order does not depend on ranks or threads; any step can be reached without reading other steps.

For rows in cluster order (NGAME), the units that are permuted and cut are clusters of at most C consecutive rows
instead of rows, so a batch consists of B / C clusters, and all rows of a cluster are in one batch.

For a source with N rows and weight w, an epoch deals each row floor(w) times, and round((w - floor(w)) * N) of the rows
once more. (seed, epoch, source) determines the chosen rows: row groups are permuted again every b = floor(N / rows
chosen) epochs, and each of the b epochs takes the next range of rows of the permutation. So whole row groups are
chosen, except for the two groups at the ends of the range. No row is chosen twice within b epochs, and w = 0.5 deals
each row once in two epochs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from schemas.errors import InputError
from schemas.ragged import Ragged, offsets_of
from schemas.randomness import Purpose, generator, torch_seed


@dataclass(frozen=True)
class WeightedGroups:
    """A source of a mix: it has the `groups` row groups after those of the source before, dealt `weight` times."""

    groups: int
    weight: float


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) within row group `group` (storage order)."""

    group: int
    start: int
    stop: int


class WindowDeal(NamedTuple):
    """One stream's window, permuted: batch b takes `rows[ends[b] : ends[b + 1]]`, which count the window's rows."""

    rows: np.ndarray  # [n] int64, a permutation; number i is row i of the window's segments, concatenated
    ends: np.ndarray  # [batches + 1]


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The order of one epoch.

    `group_rows` [M]: rows of each row group in storage order. `batch` B and `streams` S with S | B. `window_groups`:
    approximate number of row groups per window. `tail`: with 'keep', the last batches may be shorter; 'drop' leaves out
    steps that not every stream can fill. `mix`: how often each source is dealt, in storage order; empty: each row once.
    `clusters` [M]: the number of clusters in each row group, whose sizes differ by at most one row; C = `cluster` is
    the largest size, and divides B / S. None: every row is dealt on its own. `dealt` [M, 2]: the rows [first, end) of
    each row group that are dealt (a source may give a share of its rows); None: every row.
    """

    group_rows: np.ndarray
    batch: int
    streams: int
    window_groups: int
    seed: int
    epoch: int
    tail: str = "keep"
    mix: tuple[WeightedGroups, ...] = ()
    cluster: int = 1
    clusters: np.ndarray | None = None
    dealt: np.ndarray | None = None

    @cached_property
    def _dealt(self) -> np.ndarray:
        whole = np.column_stack([np.zeros(len(self.group_rows), np.int64), self.group_rows])
        return whole if self.dealt is None else self.dealt

    @cached_property
    def pieces(self) -> np.ndarray:
        """All rows of this epoch, before windows permute them, as pieces (row group, first row in it, end) [E, 3]."""
        pieces = pieces_of(self._dealt, self.mix, self.seed, self.epoch)
        return pieces[generator(self.seed, Purpose.ROW_GROUPS, self.epoch).permutation(len(pieces))]

    @cached_property
    def rows(self) -> int:
        """N, the number of rows of every epoch; computed without the permutation, because every step needs N."""
        return count_rows(self._dealt, self.mix)

    @cached_property
    def units(self) -> int:
        """Number of units in an epoch: clusters, or N rows without clusters. Streams and windows are cut in units."""
        return self.rows if self.clusters is None else int(self.clusters.sum())

    @cached_property
    def _starts(self) -> np.ndarray:
        """Number of the first unit of each piece, and the number of all units, [E + 1]."""
        return offsets_of(_sizes(self.pieces) if self.clusters is None else self.clusters[self.pieces[:, 0]])

    @property
    def units_per_batch(self) -> int:
        """Number of units that a stream contributes to a batch: B/S rows, or B/S/C clusters."""
        return self.batch // self.streams // self.cluster

    @cached_property
    def window_units(self) -> int:
        """Number of units of a stream in a window: about `window_groups` row groups, rounded up to whole batches."""
        per_group = _sizes(self._dealt) if self.clusters is None else self.clusters
        typical = int(per_group.max(initial=1)) * self.window_groups
        longest = -(-self.units // self.streams)
        return max(1, -(-min(typical, longest) // self.units_per_batch)) * self.units_per_batch

    @property
    def steps(self) -> int:
        """Number of global batches in the epoch, the same on every rank."""
        return self._steps_for(self.units)

    def _steps_for(self, units: int) -> int:
        shortest, longest = units // self.streams, -(-units // self.streams)  # streams differ by one unit at most
        return shortest // self.units_per_batch if self.tail == "drop" else -(-longest // self.units_per_batch)

    @property
    def windows(self) -> int:
        """Number of windows in the epoch."""
        return -(-self.steps * self.units_per_batch // self.window_units)

    @property
    def steps_per_window(self) -> int:
        return self.window_units // self.units_per_batch

    def steps_of(self, window: int) -> int:
        """Return the number of batches in `window`; the last window may have fewer."""
        return min(self.steps_per_window, self.steps - window * self.steps_per_window)

    def segments(self, stream: int, window: int) -> list[Segment]:
        """Return what to read for one stream's window: its pieces, cut at the window's ends, in the epoch's order."""
        return [
            Segment(group, int(bounds[0]), int(bounds[-1]))
            for group, bounds in self._bounds(stream, window)
            if bounds[0] < bounds[-1]
        ]

    def take(self, stream: int, window: int) -> WindowDeal:
        """Permute the rows of one stream's window, and cut them into its batches."""
        start, stop = self._window_range(stream, window)
        permuted = generator(self.seed, Purpose.WINDOW, self.epoch, stream, window).permutation(stop - start)
        ends = np.minimum(np.arange(self.steps_of(window) + 1) * self.units_per_batch, stop - start)
        if self.clusters is None:
            return WindowDeal(permuted, ends)
        sizes = np.concatenate([np.diff(bounds) for _, bounds in self._bounds(stream, window)] or [ends[:0]])
        rows, offsets = Ragged.from_counts(np.arange(sizes.sum()), sizes).take(permuted)  # a row for each cluster
        return WindowDeal(rows, offsets[ends])

    def _bounds(self, stream: int, window: int) -> list[tuple[int, np.ndarray]]:
        """Return (row group, bounds of its units [u + 1], as rows within it) for each piece in a stream's window.

        Without clusters, only the first bound and the last one are listed.
        """
        start, stop = self._window_range(stream, window)
        bounds, piece = list[tuple[int, np.ndarray]](), int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            upto = min(stop, int(self._starts[piece + 1]))
            if upto > start:
                group, first_row, _ = self.pieces[piece].tolist()
                first, last = start - int(self._starts[piece]), upto - int(self._starts[piece])
                if self.clusters is None:
                    bounds.append((group, np.array([first_row + first, first_row + last])))
                else:
                    rows, count = int(self.group_rows[group]), int(self.clusters[group])
                    bounds.append((group, np.arange(first, last + 1) * rows // count))
            start = upto
            piece += 1
        return bounds

    def _window_range(self, stream: int, window: int) -> tuple[int, int]:
        """Return the units [start, stop) of one stream's window."""
        first, last = stream * self.units // self.streams, (stream + 1) * self.units // self.streams
        start = min(first + window * self.window_units, last)
        return start, min(start + self.window_units, last)


@dataclass(frozen=True, eq=False)
class OrderBySource(EpochOrder):
    """The order of an epoch in which a batch has rows of one source only; `mix` lists every source, even at weight 1.

    Each source deals its own batches, and `turns` says whose batch each step takes.
    """

    @cached_property
    def _steps(self) -> list[int]:
        """Number of batches of each source; computed without a permutation, because every step needs it."""
        return [
            self._steps_for(count_rows(self._dealt[first:stop], (source,)))
            for _, first, stop, source in source_ranges(self.mix)
        ]

    @property
    def steps(self) -> int:
        """Number of global batches in the epoch; the last batch of each source may be shorter, or is dropped."""
        return sum(self._steps)

    @cached_property
    def turns(self) -> np.ndarray:
        """Number of the source that each step's batch comes from, [steps] int64."""
        numbers = np.repeat(np.arange(len(self._steps)), self._steps)
        return generator(self.seed, Purpose.TURNS, self.epoch).permutation(numbers)

    @cached_property
    def _orders(self) -> "list[SourceOrder]":
        """Order of each source: its streams as if it were alone, but cut into windows at the steps of this order."""
        bounds = np.minimum(np.arange(self.windows + 1) * self.steps_per_window, self.steps)
        return [
            SourceOrder(
                self.group_rows[first:stop],
                self.batch,
                self.streams,
                self.window_groups,
                torch_seed(self.seed, Purpose.SOURCE, number),
                self.epoch,
                self.tail,
                (source,),
                dealt=self._dealt[first:stop],
                window_starts=np.searchsorted(np.flatnonzero(self.turns == number), bounds),
            )
            for number, first, stop, source in source_ranges(self.mix)
        ]

    @cached_property
    def window_units(self) -> int:
        """Number of units per window: about `window_groups` row groups, on average at least one from each source."""
        largest = int(_sizes(self._dealt).max(initial=1))
        rows = min(largest * max(self.window_groups, len(self.mix)), self.steps * self.units_per_batch)
        return max(1, -(-rows // self.units_per_batch)) * self.units_per_batch

    def segments(self, stream: int, window: int) -> list[Segment]:
        return [
            Segment(first + segment.group, segment.start, segment.stop)
            for (_, first, _, _), order in zip(source_ranges(self.mix), self._orders, strict=True)
            for segment in order.segments(stream, window)
        ]

    def take(self, stream: int, window: int) -> WindowDeal:
        deals = [order.take(stream, window) for order in self._orders]
        starts = offsets_of(np.array([len(rows) for rows, _ in deals]))
        rows = np.concatenate([rows + start for (rows, _), start in zip(deals, starts, strict=False)])
        batches = Ragged.from_counts(rows, np.concatenate([np.diff(ends) for _, ends in deals]))  # source by source
        first = window * self.steps_per_window
        # Batch i comes at step steps[i] of the window: the batches of a source keep their order.
        steps = np.argsort(self.turns[first : first + self.steps_of(window)], kind="stable")
        return WindowDeal(*batches.take(np.argsort(steps)))


@dataclass(frozen=True, eq=False)
class SourceOrder(EpochOrder):
    """Order of one source: window w has its batches [window_starts[w], window_starts[w + 1]), int64 [W + 1]."""

    window_starts: np.ndarray | None = None

    def steps_of(self, window: int) -> int:
        return int(np.diff(self._batches(window))[0])

    def _window_range(self, stream: int, window: int) -> tuple[int, int]:
        first, last = stream * self.units // self.streams, (stream + 1) * self.units // self.streams
        start, stop = (min(first + batches * self.units_per_batch, last) for batches in self._batches(window).tolist())
        return start, stop

    def _batches(self, window: int) -> np.ndarray:
        assert self.window_starts is not None
        return self.window_starts[window : window + 2]


def streams_of_rank(streams: int, rank: int, ranks: int) -> range:
    """Return the streams of `rank`, a contiguous range of nearly equal size. Raises InputError for too many ranks."""
    if ranks > streams:
        raise InputError(
            f"order.streams = {streams} is less than the number of ranks, {ranks}, so a rank would have no rows. "
            "Raise order.streams, or use fewer ranks."
        )
    return range(streams * rank // ranks, streams * (rank + 1) // ranks)


def deal(deals: Sequence[WindowDeal]) -> tuple[np.ndarray, np.ndarray]:
    """Unite the deals of s streams for one window, with the same number of batches each.

    Return the positions of rows in the concatenated windows, batch by batch, and the batches' offsets into these
    positions [batches + 1]. Rows after a deal's last batch are left out.
    """
    starts = offsets_of(np.array([len(rows) for rows, _ in deals], np.int64))
    rows = np.concatenate([rows[: ends[-1]] + start for (rows, ends), start in zip(deals, starts, strict=False)])
    counts = np.stack([np.diff(ends) for _, ends in deals])  # [s, batches]
    offsets = offsets_of(counts.sum(axis=0))
    if counts.size and (counts == counts[0, 0]).all():  # every stream fills every batch: no sorting
        return rows.reshape(*counts.shape, -1).swapaxes(0, 1).reshape(-1), offsets
    batch_of_row = np.repeat(np.tile(np.arange(counts.shape[1]), len(deals)), counts.reshape(-1))
    return rows[np.argsort(batch_of_row, kind="stable")], offsets


def split_weight(weight: float, rows: int) -> tuple[int, int]:
    """Return how many times each of a source's `rows` rows is dealt, and how many rows are dealt once more."""
    whole = math.floor(weight)
    return whole, round((weight - whole) * rows)


def count_rows(dealt: np.ndarray, mix: Sequence[WeightedGroups]) -> int:
    """Return the number of rows of an epoch, the same in every epoch; `dealt` [M, 2] as in `pieces_of`."""
    group_rows = _sizes(dealt)
    if not mix:
        return int(group_rows.sum())
    total = 0
    for _, first, stop, source in source_ranges(mix):
        rows = int(group_rows[first:stop].sum())
        times, more = split_weight(source.weight, rows)
        total += times * rows + more
    return total


def pieces_of(dealt: np.ndarray, mix: Sequence[WeightedGroups], seed: int, epoch: int) -> np.ndarray:
    """Return the pieces that `epoch` deals, source by source: (row group, first row in it, end) [E, 3] int64.

    `dealt` [M, 2]: the rows [first, end) of each row group that may be dealt; without a `mix`, each of them once.
    """
    whole_groups = np.column_stack([np.arange(len(dealt)), dealt])
    if not mix:
        return whole_groups
    pieces = [np.empty((0, 3), np.int64)]
    for number, first, stop, source in source_ranges(mix):
        groups = whole_groups[first:stop]
        times, more = split_weight(source.weight, int(_sizes(groups).sum()))
        pieces.append(np.tile(groups, (times, 1)))
        if more:
            pieces.append(_choose(groups, more, seed, epoch, number))
    return np.concatenate(pieces)


def _choose(groups: np.ndarray, rows: int, seed: int, epoch: int, source: int) -> np.ndarray:
    """Choose the `rows` rows of one source that are dealt once more, from its pieces `groups` [m, 3]: pieces [e, 3]."""
    epochs = int(_sizes(groups).sum()) // rows  # b
    permutation, turn = divmod(epoch, epochs)
    permuted = groups[generator(seed, Purpose.MIXTURE, permutation, source).permutation(len(groups))]
    offsets = offsets_of(_sizes(permuted))
    first, stop = np.maximum(offsets[:-1], turn * rows), np.minimum(offsets[1:], (turn + 1) * rows)
    to_row = permuted[:, 1] - offsets[:-1]
    pieces = np.stack([permuted[:, 0], first + to_row, stop + to_row], axis=1)
    return pieces[first < stop]


def _sizes(pieces: np.ndarray) -> np.ndarray:
    """Return the number of rows of each piece; the last two columns of `pieces` are its first row and its end."""
    return pieces[:, -1] - pieces[:, -2]


def source_ranges(mix: Sequence[WeightedGroups]) -> Iterator[tuple[int, int, int, WeightedGroups]]:
    """Yield (number, first row group, end, source) for each source of `mix`."""
    stop = 0
    for number, source in enumerate(mix):
        first, stop = stop, stop + source.groups
        yield number, first, stop, source
