"""Order of an epoch in which each batch comes from a single source.

Each source has its own order, with streams, a tail and a weight, as if it were the only source. `turns` lists the
source of each step: each source occurs once for each of its batches, in an order permuted by (seed, epoch). A window
contains the rows of `steps_per_window` steps, from all sources.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schemas.ragged import offsets_of
from schemas.randomness import Purpose, generator, torch_seed
from trainer.stream.order import EpochOrder, Segment, WindowDeal, count_rows, source_ranges


@dataclass(frozen=True, eq=False)
class SourceOrder(EpochOrder):
    """Order of one source's rows; window w contains the batches [ends[w], ends[w + 1]); `ends` [W + 1] int64."""

    ends: np.ndarray | None = None

    def steps_of(self, window: int) -> int:
        return int(np.diff(self._batches(window))[0])

    def _window_range(self, stream: int, window: int) -> tuple[int, int]:
        first, last = stream * self.units // self.streams, (stream + 1) * self.units // self.streams
        start, stop = (min(first + batches * self.units_per_batch, last) for batches in self._batches(window).tolist())
        return start, stop

    def _batches(self, window: int) -> np.ndarray:
        assert self.ends is not None
        return self.ends[window : window + 2]


@dataclass(frozen=True, eq=False)
class OrderBySource(EpochOrder):
    """The order of an epoch with a single source in each batch; `mix` names all sources, in storage order."""

    @cached_property
    def _steps(self) -> list[int]:
        """Number of batches of each source; computed without a permutation, because every step needs it."""
        return [
            self._steps_for(count_rows(self._dealt[first:stop], (share,)))
            for _, first, stop, share in source_ranges(self.mix)
        ]

    @property
    def steps(self) -> int:
        """Number of global batches in the epoch; the last batch of each source may be shorter, or is dropped."""
        return sum(self._steps)

    @cached_property
    def turns(self) -> np.ndarray:
        """Index of the source for each step, [steps] int64."""
        numbers = np.repeat(np.arange(len(self._steps)), self._steps)
        return generator(self.seed, Purpose.TURNS, self.epoch).permutation(numbers)

    @cached_property
    def _orders(self) -> list[SourceOrder]:
        """Order of each source: a stream has the same rows as if the source were alone."""
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
                (share,),
                dealt=self._dealt[first:stop],
                ends=np.searchsorted(np.flatnonzero(self.turns == number), bounds),
            )
            for number, first, stop, share in source_ranges(self.mix)
        ]

    @cached_property
    def window_units(self) -> int:
        """Number of units per window: about `window_groups` row groups, on average at least one from each source."""
        largest = int((self._dealt[:, 1] - self._dealt[:, 0]).max(initial=1))
        rows = min(largest * max(self.window_groups, len(self.mix)), self.steps * self.units_per_batch)
        return max(1, -(-rows // self.units_per_batch)) * self.units_per_batch

    def segments(self, stream: int, window: int) -> list[Segment]:
        firsts = (first for _, first, _, _ in source_ranges(self.mix))
        return [
            Segment(first + segment.group, segment.start, segment.stop)
            for first, order in zip(firsts, self._orders, strict=True)
            for segment in order.segments(stream, window)
        ]

    def take(self, stream: int, window: int) -> WindowDeal:
        deals = [order.take(stream, window) for order in self._orders]
        starts = offsets_of(np.array([len(rows) for rows, _ in deals]))
        rows = np.concatenate([rows + start for (rows, _), start in zip(deals, starts, strict=False)])
        sizes = np.concatenate([np.diff(ends) for _, ends in deals])  # sizes of batches, source by source
        first = window * self.steps_per_window
        # Batches sorted by source come at steps `place`, which ascend within a source.
        place = np.argsort(self.turns[first : first + self.steps_of(window)], kind="stable")
        sizes_by_step, begins = np.empty_like(sizes), np.empty_like(sizes)
        sizes_by_step[place], begins[place] = sizes, offsets_of(sizes)[:-1]
        until = offsets_of(sizes_by_step)
        return WindowDeal(rows[np.repeat(begins - until[:-1], sizes_by_step) + np.arange(until[-1])], until)
