"""Builder of a window from row groups, in whatever order they are read."""

import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from trainer.stream.columns import Buffers, Lists, Matrix
from trainer.stream.order import Segment
from trainer.stream.window import Window

HARD = "hard"


class WindowBuilder:
    """Rows of `segments` laid end to end, [n]. Lists that are added are held; hard negatives are copied."""

    def __init__(self, segments: Sequence[Segment], buffers: Buffers) -> None:
        self._segments, self._buffers = segments, buffers
        self._starts = np.cumsum([0, *(segment.stop - segment.start for segment in segments)])
        self._lists: list[pa.Table | None] = [None] * len(segments)
        self._hard: Matrix | None = None
        self._lock = threading.Lock()

    def add(self, group: int, table: pa.Table) -> None:
        """Add row group `group` wherever there are segments of it. Safe to call from several threads."""
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
        """Rows that were not added, bool [n]."""
        return np.repeat([segment is None for segment in self._lists], np.diff(self._starts)).astype(bool)

    def build(self, order: np.ndarray, rows: np.ndarray, offsets: np.ndarray) -> Window:
        """Return the window whose batches take rows `order`, none of them missing. Raises ValueError where all are."""
        like = next((segment for segment in self._lists if segment is not None), None)
        if like is None:
            raise ValueError("a window of nothing")
        lists = [
            _blank(like.schema, int(size)) if segment is None else segment
            for segment, size in zip(self._lists, np.diff(self._starts), strict=True)
        ]
        columns = {name: Lists.of(lists, name) for name in like.column_names}
        return Window(columns, self._hard, order, rows, offsets, int(self.missing.sum()))


def _blank(schema: pa.Schema, rows: int) -> pa.Table:
    """Return `rows` rows of empty lists."""
    return pa.table({field.name: pa.nulls(rows, field.type) for field in schema})
