"""The order of rows: pure arithmetic on row-group sizes, far from any file (DESIGN section 5).

Row groups (all of them once, or as `mixing` weighs their sources) are permuted by (seed, epoch). The permuted sequence
of N rows is cut into S equal ranges, the canonical streams. Each stream permutes rows inside windows of a few row
groups. Global batch t takes B/S rows from every stream at cursor t * B/S, so the order does not depend on ranks or
threads, and any step is reached without reading others.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainer.randomness import generator
from trainer.stream.mixing import Share, count_rows, pieces_of


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) within row group `group` (storage order)."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The order of one epoch.

    `group_rows` [M]: rows of each row group in storage order. `batch` B and `streams` S with S | B.
    `window_groups`: row groups a window spans, about. `tail`: 'keep' makes the last batches shorter, 'drop' leaves out
    steps that not every stream can fill. `mix`: how often each source is dealt, in storage order; empty: each row once.
    """

    group_rows: np.ndarray
    batch: int
    streams: int
    window_groups: int
    seed: int
    epoch: int
    tail: str = "keep"
    mix: tuple[Share, ...] = ()

    @cached_property
    def pieces(self) -> np.ndarray:
        """(row group's storage number, first row, end) of all that is dealt, in this epoch's order, [E, 3] int64."""
        pieces = pieces_of(self.group_rows, self.mix, self.seed, self.epoch)
        return pieces[generator(self.seed, "row groups", self.epoch).permutation(len(pieces))]

    @cached_property
    def _starts(self) -> np.ndarray:
        """Position at which each piece starts, and N at the end, [E + 1]."""
        return np.concatenate([[0], np.cumsum(self.pieces[:, 2] - self.pieces[:, 1])]).astype(np.int64)

    @cached_property
    def rows(self) -> int:
        """N, the rows of every epoch; asked for at every step, so it does not wait for the permutation."""
        return count_rows(self.group_rows, self.mix)

    @property
    def share(self) -> int:
        """Rows a stream gives to a batch, B/S."""
        return self.batch // self.streams

    @cached_property
    def window_rows(self) -> int:
        """Rows of a window: about `window_groups` row groups, a multiple of B/S so that no batch straddles windows."""
        typical = int(self.group_rows.max(initial=1)) * self.window_groups
        longest = -(-self.rows // self.streams)
        return max(1, -(-min(typical, longest) // self.share)) * self.share

    @property
    def steps(self) -> int:
        """Global batches in the epoch, the same on every rank."""
        shortest, longest = self.rows // self.streams, -(-self.rows // self.streams)
        return shortest // self.share if self.tail == "drop" else -(-longest // self.share)

    @property
    def windows(self) -> int:
        """Windows in the epoch."""
        return -(-self.steps * self.share // self.window_rows)

    @property
    def steps_per_window(self) -> int:
        return self.window_rows // self.share

    def segments(self, stream: int, window: int) -> list[Segment]:
        """What to read for one stream's window, in the epoch's order."""
        start, stop = self._window_range(stream, window)
        segments: list[Segment] = []
        at = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            upto = min(stop, int(self._starts[at + 1]))
            if upto > start:
                group, first_row, _ = self.pieces[at].tolist()
                base = int(self._starts[at]) - first_row
                segments.append(Segment(group, start - base, upto - base))
            start = upto
            at += 1
        return segments

    def shuffle(self, stream: int, window: int) -> np.ndarray:
        """The permutation of one stream's window: its segments, laid end to end, are dealt in this order, [n]."""
        start, stop = self._window_range(stream, window)
        return generator(self.seed, "window", self.epoch, stream, window).permutation(stop - start)

    def goes_on(self, last: Segment) -> bool:
        """Whether the row group of a window's last segment has rows after it."""
        return last.stop < int(self.group_rows[last.group])

    def batch_rows(self, step: int, streams: range, first_row: np.ndarray) -> np.ndarray:
        """Row ids of batch `step` from `streams`, by the definition: the law that readers are tested against.

        `first_row` [M + 1]: id of the first row of each row group in storage order.
        """
        window, within = divmod(step, self.steps_per_window)
        parts = []
        for stream in streams:
            segments = self.segments(stream, window)
            ids = np.concatenate(
                [np.arange(s.start, s.stop) + first_row[s.group] for s in segments] or [np.empty(0, np.int64)]
            )
            parts.append(ids[self.shuffle(stream, window)][within * self.share : (within + 1) * self.share])
        return np.concatenate(parts)

    def _window_range(self, stream: int, window: int) -> tuple[int, int]:
        """Positions [start, stop) of one stream's window in the permuted sequence."""
        first, last = self._range(stream)
        start = min(first + window * self.window_rows, last)
        return start, min(start + self.window_rows, last)

    def _range(self, stream: int) -> tuple[int, int]:
        """Positions [first, last) of a stream in the permuted sequence."""
        return stream * self.rows // self.streams, (stream + 1) * self.rows // self.streams


def streams_of_rank(streams: int, rank: int, ranks: int) -> range:
    """The streams that `rank` of `ranks` owns: contiguous, so ranks' batches laid end to end are the global one.

    Raises ValueError where ranks do not divide streams.
    """
    if streams % ranks:
        raise ValueError(f"{ranks} ranks do not divide {streams} canonical streams (order.streams)")
    each = streams // ranks
    return range(rank * each, (rank + 1) * each)


def deal(sizes: list[int], share: int, batches: int) -> tuple[np.ndarray, np.ndarray]:
    """How rows of several streams' windows, laid end to end, become `batches` batches.

    `sizes` [s]: rows of each stream's window. Returns the gather order (batch by batch, stream by stream within) and
    the batches' offsets into it [batches + 1]; rows beyond the last batch are left out, missing ones leave it shorter.
    """
    each = batches * share
    if sizes and set(sizes) == {each}:  # every stream fills every batch: no sorting
        order = np.arange(len(sizes) * each).reshape(len(sizes), batches, share).swapaxes(0, 1)
        return order.reshape(-1), np.arange(batches + 1) * (len(sizes) * share)
    number = np.concatenate([np.arange(size) // share for size in sizes] or [np.empty(0, np.int64)])
    counts = np.bincount(number, minlength=batches)[:batches]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return np.argsort(number, kind="stable")[: offsets[-1]], offsets
