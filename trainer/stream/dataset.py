"""The joined stream: an iterable dataset whose state is (seed, epoch, step, negative tables, format version)."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import IterableDataset

from schemas import tables
from schemas.errors import InputError
from schemas.parquet import list_column, matrix_column
from trainer.inputs import Inputs, Kind
from trainer.stream.batch import Batch, Columns
from trainer.stream.order import EpochOrder, deal, iterate_windows, streams_of_rank
from trainer.stream.source import RowGroups, Source

STATE_VERSION = 1


class JoinedStream(IterableDataset):
    """Batches of one rank, in the order of DESIGN section 5, with the current negatives joined.

    `sources`: tables dealt as one, each as often as its weight says. `labels`: L. `inputs`: what the encoder reads.
    Iterating yields the rest of the current epoch as `Batch`es; call `set_epoch` for the next. `state_dict` is small
    and the same on every rank; `load_state_dict` is O(1): it reads nothing before the step to resume at.
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
        self._groups = RowGroups(sources, self._label_type, inputs)
        self._batch, self._streams_total, self._window_groups = batch, streams, window_groups
        self._seed, self._threads, self._tail = seed, threads, tail
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
            self._groups = RowGroups(sources, self._label_type, self._inputs)

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
        for window, within, columns, offsets in self._windows(order):
            first = window * order.steps_per_window
            for number in range(within, len(offsets) - 1):
                self._step = first + number + 1
                yield columns.slice(order.epoch, first + number, int(offsets[number]), int(offsets[number + 1]))

    def _windows(self, order: EpochOrder) -> Iterator[tuple[int, int, Columns, np.ndarray]]:
        """Decoded windows in order, the next ones decoded ahead by threads."""
        plan = iterate_windows(order, self._step)
        if self._threads == 0:
            for window, within in plan:
                yield (window, within, *self._decode(order, window))
            return
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="extremis-stream")
        ahead: deque[tuple[int, int, Future]] = deque()
        try:
            for window, within in plan:
                ahead.append((window, within, pool.submit(self._decode, order, window)))
                if len(ahead) > self._threads:
                    number, skip, future = ahead.popleft()
                    yield (number, skip, *future.result())
            while ahead:
                number, skip, future = ahead.popleft()
                yield (number, skip, *future.result())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _decode(self, order: EpochOrder, window: int) -> tuple[Columns, np.ndarray]:
        """The rank's windows number `window`, gathered into batch order, and the batches' offsets."""
        groups: dict[int, pa.Table] = {}
        pieces: list[pa.Table] = []
        ids: list[np.ndarray] = []
        places: list[np.ndarray] = []
        sizes: list[int] = []
        for stream in self._streams:
            segments, shuffle = order.window(stream, window)
            places.append(shuffle + sum(sizes))
            sizes.append(len(shuffle))
            for segment in segments:
                if segment.group not in groups:
                    groups[segment.group] = self._groups.read(segment.group)
                pieces.append(groups[segment.group].slice(segment.start, segment.stop - segment.start))
                first = self._groups.first_row[segment.group]
                ids.append(np.arange(first + segment.start, first + segment.stop))
        if not pieces:  # fewer rows than streams: this rank has none here, but as many steps as the others
            pieces, ids = [self._groups.read(0).slice(0, 0)], [np.empty(0, np.int64)]
        batches = min(order.steps_per_window, order.steps - window * order.steps_per_window)
        dealt, offsets = deal(sizes, order.share, batches)
        take = np.concatenate(places)[dealt]
        table = pa.concat_tables(pieces).combine_chunks().take(pa.array(take))
        positives, positive_offsets = list_column(table, "label_ids")
        hard = matrix_column(table, "hard") if "hard" in table.column_names else None
        columns = Columns(np.concatenate(ids)[take], Inputs.of(table), positives, positive_offsets, hard)
        return columns, offsets
