"""Window of the stream: the rows that a rank reads at once, stored by column, and the batches of these rows."""

import itertools
import threading
from dataclasses import dataclass

import numba
import numpy as np
import pyarrow as pa

from schemas.arrow import DENSE
from schemas.ragged import Ragged, offsets_of
from trainer.inputs import Inputs
from trainer.prefetch import prefetch
from trainer.stream.batch import Batch

_AHEAD = 16  # rows prefetched from memory while another row is copied
_NEXT = np.uint64(1)
HARD, FILTERED = "hard", "filter_label_ids"  # the columns of joined negatives, and of labels that are no negatives
_BATCHES = 8  # batches gathered at a time: few calls, and the memory is reused while it is still in the cache


def take_batches(column: Ragged, rows: np.ndarray, bounds: np.ndarray) -> list[Ragged]:
    """Return the rows `rows[bounds[i] : bounds[i + 1]]` of each batch i in [0, b); `bounds` [b + 1] starts at 0."""
    ends, stops = np.empty(len(rows) + len(bounds) - 1, np.int64), np.empty(len(bounds), np.int64)
    values = np.empty(_find_rows(column.offsets, rows, bounds, ends, stops), column.values.dtype)
    _copy_rows(column.values, column.offsets, rows, values)
    parts = zip(itertools.pairwise(stops.tolist()), itertools.pairwise(bounds.tolist()), strict=True)
    return [
        Ragged(values[low:high], ends[batch + start : batch + stop + 1])
        for batch, ((low, high), (start, stop)) in enumerate(parts)
    ]


@numba.njit(nogil=True, cache=True)
def _find_rows(offsets, rows, bounds, ends, stops):  # type: ignore[no-untyped-def]
    """Write the offsets of each batch, and the end of its values; return the number of values."""
    size = 0
    stops[0] = 0
    for batch in range(len(bounds) - 1):
        ends[bounds[batch] + batch] = 0
        for i in range(bounds[batch], bounds[batch + 1]):
            row = np.uint64(rows[i])  # unsigned: avoids the test for an index below 0
            size += offsets[row + _NEXT] - offsets[row]
            ends[i + batch + 1] = size - stops[batch]
        stops[batch + 1] = size
    return size


@numba.njit(nogil=True, cache=True)
def _copy_rows(values, offsets, rows, into):  # type: ignore[no-untyped-def]
    begin, end = np.intp(values.ctypes.data), np.uint64(0)
    for number in range(len(rows)):
        ahead = rows[min(number + _AHEAD, len(rows) - 1)]
        prefetch(begin + offsets[ahead] * values.itemsize)
        row = np.uint64(rows[number])
        for i in range(np.uint64(offsets[row]), np.uint64(offsets[row + _NEXT])):
            into[end] = values[i]
            end += _NEXT


class Buffers:
    """Memory that windows reuse, because allocating new pages takes as long as filling them. Thread-safe."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}  # by the bytes of a row
        self._lock = threading.Lock()

    def take(self, rows: int, type: pa.FixedSizeListType) -> np.ndarray:
        """Return uninitialised memory for `rows` rows of a fixed-size list column [n, K], to `give` back after use."""
        dtype = pa.array([], type.value_type).to_numpy().dtype
        width = type.list_size * dtype.itemsize
        size = rows * width
        with self._lock:
            free = self._free.setdefault(width, [])
            number = next((n for n, buffer in enumerate(free) if len(buffer) >= size), None)
            if number is None:
                free.clear()  # too small for the current windows
            memory = np.empty(size, np.uint8) if number is None else free.pop(number)
        return memory[:size].view(dtype).reshape(rows, type.list_size)

    def give(self, values: np.ndarray) -> None:
        """Make memory from `take` available again; no reference to the memory may remain."""
        memory = values.base
        assert isinstance(memory, np.ndarray), "lent values are a view of a whole buffer"
        with self._lock:
            self._free.setdefault(values.shape[1] * values.itemsize, []).append(memory)


@dataclass(frozen=True)
class Window:
    """Columns of a window in reading order: lists, and matrices [n, K] in memory from `buffers`.

    Batch i takes rows `order[offsets[i]:offsets[i + 1]]`; `rows` contains the global row ids in `order`. `skipped` rows
    could not be decoded and are in no batch.
    """

    lists: dict[str, Ragged]
    matrices: dict[str, np.ndarray]
    buffers: Buffers
    order: np.ndarray
    rows: np.ndarray
    offsets: np.ndarray
    skipped: int = 0

    def close(self) -> None:
        """Return the memory to `buffers`; no more batches may be requested."""
        for values in self.matrices.values():
            self.buffers.give(values)

    def pieces(self, first_step: int, steps: range) -> list[range]:
        """Return the `steps` (ascending) that are in this window, a few at a time; batch 0 belongs to `first_step`."""
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
        matrices = {name: values.take(order, axis=0) for name, values in self.matrices.items()}
        columns = {name: take_batches(column, order, bounds) for name, column in self.lists.items()}
        batches, bounds = [], bounds.tolist()
        for step, begin, end, *lists in zip(steps, bounds[:-1], bounds[1:], *columns.values(), strict=True):
            by_name = dict(zip(columns, lists, strict=True))
            labels, own = by_name["label_ids"], {name: values[begin:end] for name, values in matrices.items()}
            inputs = Inputs.from_columns(by_name, own.get(DENSE))
            columns_of = rows[begin:end], inputs, labels.values, labels.offsets, own.get(HARD)
            batches.append(Batch(epoch, step, *columns_of, filtered=by_name.get(FILTERED)))
        return batches
