"""Columns of many row groups laid end to end, and rows taken from them: whole rows are copied, whatever the column."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from schemas.parquet import list_column, matrix_column

_INT32_BYTES = 2**31 - 1


@dataclass(frozen=True)
class Lists:
    """A list column. Its rows are kept as strings of bytes, which Arrow takes five times as fast as lists."""

    bytes: pa.Array
    dtype: np.dtype

    @classmethod
    def of(cls, tables: Sequence[pa.Table], name: str) -> "Lists":
        """Column `name` of `tables` laid end to end."""
        parts = [list_column(table, name) for table in tables]
        wide = sum(values.nbytes for values, _ in parts) > _INT32_BYTES
        return cls(pa.concat_arrays([_as_bytes(*part, wide) for part in parts]), parts[0][0].dtype)

    def take(self, rows: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Rows `rows` [n]: values [V], offsets int64 [n + 1] from 0."""
        taken = self.bytes.take(rows)
        _, ends, data = taken.buffers()
        wide = pa.types.is_large_binary(taken.type)
        offsets = np.frombuffer(ends, np.int64 if wide else np.int32, len(taken) + 1) // self.dtype.itemsize
        return np.frombuffer(data, self.dtype, int(offsets[-1])), offsets.astype(np.int64)


@dataclass(frozen=True)
class Matrix:
    """A fixed-size list column of `width` values a row, kept as bytes too."""

    bytes: pa.Array
    dtype: np.dtype
    width: int

    @classmethod
    def of(cls, tables: Sequence[pa.Table], name: str) -> "Matrix":
        """Column `name` of `tables` laid end to end."""
        parts = [matrix_column(table, name) for table in tables]
        width, dtype = parts[0].shape[1], parts[0].dtype
        kind = pa.binary(width * dtype.itemsize)
        column = pa.concat_arrays(
            [pa.Array.from_buffers(kind, len(part), [None, pa.py_buffer(part)]) for part in parts]
        )
        return cls(column, dtype, width)

    def take(self, rows: pa.Array) -> np.ndarray:
        """Rows `rows` [n]: [n, width]."""
        taken = self.bytes.take(rows)
        return np.frombuffer(taken.buffers()[1], self.dtype, len(taken) * self.width).reshape(-1, self.width)


def _as_bytes(values: np.ndarray, offsets: np.ndarray, wide: bool) -> pa.Array:
    ends = (offsets * values.itemsize).astype(np.int64 if wide else np.int32)
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(
        pa.large_binary() if wide else pa.binary(), len(ends) - 1, [None, pa.py_buffer(ends), data]
    )
