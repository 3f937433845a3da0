"""Window of the stream: the rows that a rank reads at once, and the batches that take them."""

import itertools
from dataclasses import dataclass

import numpy as np

from schemas.ragged import offsets_of
from trainer.inputs import Inputs
from trainer.stream.batch import Batch
from trainer.stream.columns import Lists, Matrix

_BATCHES = 8  # gathered at a time: few calls, and memory that is used again while the processor still holds it


@dataclass(frozen=True)
class Window:
    """Columns of a window in the order of reading.

    Batch i takes rows `order[offsets[i]:offsets[i + 1]]` of them; `rows` are the global ids of `order`'s. `skipped`
    rows did not decode and are in no batch.
    """

    lists: dict[str, Lists]
    hard: Matrix | None
    order: np.ndarray
    rows: np.ndarray
    offsets: np.ndarray
    skipped: int = 0

    def close(self) -> None:
        """Return the memory: no more batches will be asked for."""
        if self.hard is not None:
            self.hard.close()

    def pieces(self, first_step: int, steps: range) -> list[range]:
        """Return those of `steps` (ascending) that are in this window, a few at a time; batch 0 is of `first_step`."""
        skipped = max(0, -(-(first_step - steps.start) // steps.step))
        stop = min(first_step + len(self.offsets) - 1, steps.stop)
        within = range(steps.start + skipped * steps.step, stop, steps.step)
        return [within[first : first + _BATCHES] for first in range(0, len(within), _BATCHES)]

    def batches(self, epoch: int, first_step: int, steps: range) -> list[Batch]:
        """Gather the batches of `steps` together."""
        numbers = np.asarray(steps) - first_step
        low, high = self.offsets[numbers], self.offsets[numbers + 1]
        if steps.step == 1:
            order, rows = self.order[low[0] : high[-1]], self.rows[low[0] : high[-1]]
        else:
            picked = [slice(*bounds) for bounds in zip(low, high, strict=True)]
            order, rows = (np.concatenate([column[part] for part in picked]) for column in (self.order, self.rows))
        bounds = offsets_of(high - low)
        hard = None if self.hard is None else self.hard.take(order)
        columns = {name: column.take(order, bounds) for name, column in self.lists.items()}
        return [
            Batch(
                epoch,
                step,
                rows[begin:end],
                Inputs.from_columns(lists),
                lists["label_ids"].values,
                lists["label_ids"].offsets,
                None if hard is None else hard[begin:end],
            )
            for step, (begin, end), lists in zip(
                steps,
                itertools.pairwise(bounds.tolist()),
                (dict(zip(columns, lists, strict=True)) for lists in zip(*columns.values(), strict=True)),
                strict=True,
            )
        ]
