"""The joined stream: an iterable dataset whose state is (seed, epoch, step, negative tables, format version)."""

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from schemas import tables
from schemas.errors import InputError
from trainer.inputs import Kind
from trainer.stream.ahead import in_background, submit_ahead
from trainer.stream.batch import Batch, Candidates
from trainer.stream.decode import Damaged, decodings
from trainer.stream.order import EpochOrder, streams_of_rank
from trainer.stream.source import Reading, RowGroups, Source
from trainer.stream.window import Window

STATE_VERSION = 1
THREAD = "extremis-stream"
BATCHES_AHEAD = 16
WINDOWS_FETCHED = 1  # beyond those that threads decode: what a remote store is asked for meanwhile

Plan = Callable[[Batch], Candidates | None]


class JoinedStream(IterableDataset):
    """Batches of one rank, in the order of DESIGN section 5, with the current negatives joined.

    `sources`: tables dealt as one, each as often as its weight says. `labels`: L. `inputs`: what the encoder reads.
    `threads` read and decode ahead, and one more runs `plan`, which gives each batch its candidates; 0 does all of it
    in line. `damaged`: whether a row group that does not decode stops the stream (TableError), or is left out and
    counted in `skipped_rows`. `reading`: how storage is read. Iterating yields the rest of the current epoch as
    `Batch`es; call `set_epoch` for the next. `state_dict` is small and the same on every rank; `load_state_dict` is
    O(1): it reads nothing before the step to resume at.
    """

    def __init__(
        self,
        sources: list[Source],
        labels: int,
        *,
        inputs: Kind = "tokens",
        batch: int,
        streams: int,
        window_groups: int = 4,
        seed: int = 0,
        threads: int = 1,
        tail: str = "keep",
        rank: int = 0,
        ranks: int = 1,
        plan: Plan | None = None,
        damaged: Damaged = "stop",
        reading: Reading | None = None,
    ) -> None:
        super().__init__()
        try:
            self._streams = streams_of_rank(streams, rank, ranks)
        except ValueError as error:
            raise InputError(f"{error}; choose order.streams as a multiple of the ranks.") from None
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            raise InputError(f"two sources of one name: {', '.join(names)}. Give each a name of its own.")
        self._label_type = tables.label_type(labels)
        self._sources, self._inputs = sources, inputs
        self._reading = reading
        self._groups = RowGroups(sources, self._label_type, inputs, reading)
        self._batch, self._streams_total, self._window_groups = batch, streams, window_groups
        self._seed, self._threads, self._tail = seed, threads, tail
        self._plan, self._damaged = plan, damaged
        self.skipped_rows = 0
        self._epoch, self._step = 0, 0

    @property
    def rows(self) -> int:
        """Rows of all sources, whatever their weights: row ids are below it."""
        return int(self._groups.first_row[-1])

    @property
    def sources(self) -> list[Source]:
        return self._sources

    @property
    def first_row(self) -> np.ndarray:
        """Id of the first row of each row group, and N at the end, [M + 1]."""
        return self._groups.first_row

    @property
    def order(self) -> EpochOrder:
        """The order of the current epoch."""
        return EpochOrder(
            self._groups.group_rows,
            self._batch,
            self._streams_total,
            self._window_groups,
            self._seed,
            self._epoch,
            self._tail,
            self._groups.mix,
        )

    @property
    def steps(self) -> int:
        """Batches in an epoch, the same on every rank."""
        return self.order.steps

    def __len__(self) -> int:
        return self.steps

    def set_epoch(self, epoch: int, sources: list[Source] | None = None) -> None:
        """Start `epoch` at its first step; `sources` bring newly adopted negatives."""
        self._epoch, self._step = epoch, 0
        if sources is not None:
            self._sources = sources
            self._groups = RowGroups(sources, self._label_type, self._inputs, self._reading)

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "seed": self._seed,
            "epoch": self._epoch,
            "step": self._step,
            "rows": self.rows,
            "batch": self._batch,
            "streams": self._streams_total,
            "window_groups": self._window_groups,
            "tail": self._tail,
            "mix": [[source.name, source.weight] for source in self._sources],
            "tables": {s.name: s.table.manifest.digest for s in self._sources},
            "negatives": {s.name: s.negatives.manifest.digest for s in self._sources if s.negatives is not None},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the step of `state`. Raises InputError when the order that it belongs to is not this one."""
        mine = self.state_dict()
        for name, value in mine.items():
            if name not in ("epoch", "step") and state.get(name) != value:
                raise InputError(
                    f"cannot resume the stream: {name} was {state.get(name)!r} when it was saved and is {value!r} "
                    "now. Resume with the same data, recipe and tables, or start a new run."
                )
        self._epoch, self._step = state["epoch"], state["step"]

    def __iter__(self) -> Iterator[Batch]:
        order = self.order
        batches = self._batches(order, self._step)
        if self._threads:
            batches = in_background(batches, BATCHES_AHEAD, f"{THREAD}-plan")
        with contextlib.closing(batches):
            for batch in batches:
                self._step = batch.step + 1
                yield batch

    def _batches(self, order: EpochOrder, step: int) -> Generator[Batch, None, None]:
        """The epoch from `step` on, planned."""
        _keep_freed_memory()
        with contextlib.closing(self._windows(order, step)) as windows:
            for first, window in windows:
                self.skipped_rows += window.skipped
                for batch in window.batches(order.epoch, first, max(0, step - first)):
                    yield batch if self._plan is None else replace(batch, candidates=self._plan(batch))

    def _windows(self, order: EpochOrder, step: int) -> Generator[tuple[int, Window], None, None]:
        """Decoded windows from that of `step` on, each with its first step; threads decode the next ones ahead."""
        first = step // order.steps_per_window
        steps = (window * order.steps_per_window for window in range(first, order.windows))
        fetched = self._threads + WINDOWS_FETCHED
        tasks = decodings(order, self._groups, self._streams, first, fetched, self._damaged)
        try:
            if not self._threads:
                yield from zip(steps, (task() for task in tasks), strict=True)
                return
            with ThreadPoolExecutor(self._threads, thread_name_prefix=THREAD) as pool:
                try:
                    yield from zip(steps, submit_ahead(pool, tasks, self._threads), strict=True)
                finally:
                    pool.shutdown(wait=True, cancel_futures=True)
        finally:
            self._groups.close()


@functools.cache
def _keep_freed_memory() -> None:
    """Once a process, before batches are made.

    glibc gives a block above 128 KiB back to the system when it is freed, until a larger one has been freed once: a
    batch's arrays would then cost a page fault every 4 KiB, which doubles the time of planning.
    """
    np.empty(24 << 20, np.uint8)
