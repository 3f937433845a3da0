"""A window: the rows that a rank reads at once, and how its batches take them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trainer.inputs import Inputs, cut
from trainer.stream.batch import Batch
from trainer.stream.gather import Lists, Matrix

_BATCHES = 16  # gathered at a time: few calls, and memory that is used again while the processor still holds it


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

    @classmethod
    def of(
        cls, pieces: Sequence[pa.Table], order: np.ndarray, rows: np.ndarray, offsets: np.ndarray, skipped: int = 0
    ) -> "Window":
        """From row groups and parts of them, laid end to end."""
        names = [name for name in pieces[0].column_names if name != "hard"]
        hard = Matrix.of(pieces, "hard") if "hard" in pieces[0].column_names else None
        return cls({name: Lists.of(pieces, name) for name in names}, hard, order, rows, offsets, skipped)

    def batches(self, epoch: int, first_step: int, start: int) -> Iterator[Batch]:
        """The window's batches from number `start` on; number 0 is that of `first_step`."""
        count = len(self.offsets) - 1
        for first in range(start, count, _BATCHES):
            last = min(first + _BATCHES, count)
            low, high = int(self.offsets[first]), int(self.offsets[last])
            taken = pa.array(self.order[low:high])
            columns = {name: column.take(taken) for name, column in self.lists.items()}
            hard = None if self.hard is None else self.hard.take(taken)
            inputs = Inputs.read(columns, columns.__getitem__)
            positives, positive_offsets = columns["label_ids"]
            for number in range(first, last):
                begin, end = int(self.offsets[number]) - low, int(self.offsets[number + 1]) - low
                yield Batch(
                    epoch,
                    first_step + number,
                    self.rows[low + begin : low + end],
                    inputs.slice(begin, end),
                    *cut(positives, positive_offsets, begin, end),
                    None if hard is None else hard[begin:end],
                )
