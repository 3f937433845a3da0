"""The parts of a window, put in their places as they are read."""

import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from trainer.stream.columns import Buffers, Lists, Matrix
from trainer.stream.order import Segment
from trainer.stream.window import Window

HARD = "hard"


class Parts:
    """`segments` laid end to end, [n] rows. Of what is added only the lists are held; hard negatives are copied."""

    def __init__(self, segments: Sequence[Segment], buffers: Buffers) -> None:
        self._segments, self._buffers = segments, buffers
        self._starts = np.cumsum([0, *(segment.stop - segment.start for segment in segments)])
        self._lists: list[pa.Table | None] = [None] * len(segments)
        self._hard: Matrix | None = None
        self._lock = threading.Lock()

    def add(self, group: int, table: pa.Table) -> None:
        """Row group `group`, wherever there are parts of it. Any thread may add."""
        if HARD in table.column_names:
            with self._lock:
                if self._hard is None:
                    self._hard = Matrix.lent(int(self._starts[-1]), table.schema.field(HARD).type, self._buffers)
            hard, table = table.select([HARD]), table.drop_columns(HARD)
        for number, segment in enumerate(self._segments):
            if segment.group == group:
                rows = segment.stop - segment.start
                self._lists[number] = table.slice(segment.start, rows)
                if self._hard is not None:
                    self._hard.write(hard.slice(segment.start, rows), HARD, int(self._starts[number]))

    @property
    def missing(self) -> np.ndarray:
        """Rows of which nothing was added, bool [n]."""
        return np.repeat([part is None for part in self._lists], np.diff(self._starts)).astype(bool)

    def window(self, order: np.ndarray, rows: np.ndarray, offsets: np.ndarray) -> Window:
        """The window whose batches take rows `order`, none of them missing. Raises ValueError where all are."""
        like = next((part for part in self._lists if part is not None), None)
        if like is None:
            raise ValueError("a window of nothing")
        lists = [
            _blank(like.schema, int(size)) if part is None else part
            for part, size in zip(self._lists, np.diff(self._starts), strict=True)
        ]
        columns = {name: Lists.of(lists, name) for name in like.column_names}
        return Window(columns, self._hard, order, rows, offsets, int(self.missing.sum()))


def _blank(schema: pa.Schema, rows: int) -> pa.Table:
    """Empty lists."""
    offsets = pa.array(np.zeros(rows + 1, np.int32))
    arrays = [pa.ListArray.from_arrays(offsets, pa.array([], field.type.value_type)) for field in schema]
    return pa.Table.from_arrays(arrays, names=schema.names)
