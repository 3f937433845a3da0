"""Columns of many row groups, laid end to end, of which whole rows are taken."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column, matrix_column

_INT32_BYTES = 2**31 - 1


@dataclass(frozen=True)
class Lists:
    """A list column. Its rows are held as strings of bytes, which Arrow takes five times as fast as lists."""

    bytes: pa.Array
    dtype: np.dtype

    @classmethod
    def of(cls, tables: Sequence[pa.Table], name: str) -> "Lists":
        """Lay column `name` of `tables` end to end."""
        parts = [list_column(table, name) for table in tables]
        wide = sum(part.values.nbytes for part in parts) > _INT32_BYTES
        return cls(pa.concat_arrays([_as_bytes(part, wide) for part in parts]), parts[0].values.dtype)

    def take(self, rows: pa.Array) -> Ragged:
        """Return rows `rows` [n]; offsets int64, from 0."""
        strings = self.bytes.take(rows)
        _, ends, data = strings.buffers()
        wide = pa.types.is_large_binary(strings.type)
        offsets = np.frombuffer(ends, np.int64 if wide else np.int32, len(strings) + 1) // self.dtype.itemsize
        return Ragged(np.frombuffer(data, self.dtype, int(offsets[-1])), offsets.astype(np.int64))


@dataclass(frozen=True)
class Matrix:
    """A fixed-size list column, `values` [n, K], in memory that is lent until `close`."""

    values: np.ndarray
    _memory: np.ndarray
    _lender: "Buffers"

    @classmethod
    def lent(cls, rows: int, type: pa.FixedSizeListType, lender: "Buffers") -> "Matrix":
        """Borrow memory for `rows` rows, which are to be written."""
        dtype = pa.array([], type.value_type).to_numpy().dtype
        memory = lender.take(rows * type.list_size * dtype.itemsize)
        values = memory[: rows * type.list_size * dtype.itemsize].view(dtype).reshape(rows, type.list_size)
        return cls(values, memory, lender)

    def close(self) -> None:
        """Return the memory. Rows that were taken have their own."""
        self._lender.give(self._memory)

    def write(self, table: pa.Table, name: str, start: int) -> None:
        """Write column `name` of `table` into the rows from `start` on."""
        self.values[start : start + table.num_rows] = matrix_column(table, name)

    def take(self, rows: pa.Array) -> np.ndarray:
        """Return rows `rows` [m] in memory of their own, [m, K]."""
        kind = pa.binary(self.values.shape[1] * self.values.itemsize)
        column = pa.Array.from_buffers(kind, len(self.values), [None, pa.py_buffer(self.values)])
        values = np.frombuffer(column.take(rows).buffers()[1], self.values.dtype)
        return values[: len(rows) * self.values.shape[1]].reshape(-1, self.values.shape[1])


class Buffers:
    """Memory that windows use in turns: new pages cost as much as filling them. Safe to use from several threads."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray:
        """Return at least `size` bytes, uint8, of any content."""
        with self._lock:
            for number, buffer in enumerate(self._free):
                if len(buffer) >= size:
                    return self._free.pop(number)
            self._free = []  # too small for the windows of now
        return np.empty(size, np.uint8)

    def give(self, buffer: np.ndarray) -> None:
        """Return memory that nothing refers to any more."""
        with self._lock:
            self._free.append(buffer)


def _as_bytes(rows: Ragged, wide: bool) -> pa.Array:
    ends = (rows.offsets * rows.values.itemsize).astype(np.int64 if wide else np.int32)
    data = pa.py_buffer(np.ascontiguousarray(rows.values))
    return pa.Array.from_buffers(
        pa.large_binary() if wide else pa.binary(), len(ends) - 1, [None, pa.py_buffer(ends), data]
    )
