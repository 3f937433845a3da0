"""Rows of several row groups in batch order: a few copies of whole rows, whatever the column."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from schemas.parquet import list_column, matrix_column

_INT32_BYTES = 2**31 - 1


def take_lists(tables: Sequence[pa.Table], name: str, rows: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Rows `rows` [n] of a list column of `tables` laid end to end: values [V], offsets int64 [n + 1] from 0."""
    parts = [list_column(table, name) for table in tables]
    dtype = parts[0][0].dtype
    # As strings of bytes: Arrow then copies a row at a time, five times as fast as its take of lists.
    wide = sum(values.nbytes for values, _ in parts) > _INT32_BYTES
    column = pa.concat_arrays([_as_bytes(*part, wide) for part in parts])
    taken = column.take(rows)
    _, ends, data = taken.buffers()
    offsets = np.frombuffer(ends, np.int64 if wide else np.int32, len(taken) + 1)
    values = np.frombuffer(data, dtype, int(offsets[-1]) // dtype.itemsize)
    return values, offsets.astype(np.int64) // dtype.itemsize


def take_matrix(tables: Sequence[pa.Table], name: str, rows: pa.Array) -> np.ndarray:
    """Rows `rows` [n] of a fixed-size list column of `tables` laid end to end: [n, K]."""
    parts = [matrix_column(table, name) for table in tables]
    width, dtype = parts[0].shape[1], parts[0].dtype
    column = pa.concat_arrays(
        [
            pa.Array.from_buffers(pa.binary(width * dtype.itemsize), len(part), [None, pa.py_buffer(part)])
            for part in parts
        ]
    )
    taken = column.take(rows)
    return np.frombuffer(taken.buffers()[1], dtype, len(taken) * width).reshape(-1, width)


def _as_bytes(values: np.ndarray, offsets: np.ndarray, wide: bool) -> pa.Array:
    ends = (offsets * values.itemsize).astype(np.int64 if wide else np.int32)
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(
        pa.large_binary() if wide else pa.binary(), len(ends) - 1, [None, pa.py_buffer(ends), data]
    )
