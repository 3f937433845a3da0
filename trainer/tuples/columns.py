"""Columns by row: copied once to scratch files in TMPDIR that are mapped, so that memory holds what it has room for."""

import numpy as np
import pyarrow as pa

from schemas.mapped import ScratchFile
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table


def open_strings(table: Table, column: str) -> pa.LargeStringArray:
    """Return a column of strings [N]. Raises TableError, StorageError."""
    values, offsets = ScratchFile("texts"), ScratchFile("texts")
    stop = 0
    for group in table.batches([column]):
        array = pa.concat_arrays([pa.array([], pa.large_string()), *group[column].cast(pa.large_string()).chunks])
        _, starts, data = array.buffers()
        bounds = np.frombuffer(starts, np.int64)[array.offset : array.offset + len(array) + 1]
        values.write(memoryview(data or b"")[bounds[0] : bounds[-1]])
        offsets.write((bounds[:-1] - bounds[0] + stop).data)
        stop += int(bounds[-1] - bounds[0])
    offsets.write(np.array([stop], np.int64).data)
    return pa.LargeStringArray.from_buffers(table.rows, pa.py_buffer(offsets.map()), pa.py_buffer(values.map()))


def open_matrix(table: Table, column: str) -> np.ndarray:
    """Return a column of lists of K numbers, [N, K]. Raises TableError, StorageError."""
    file, dtype = ScratchFile("scores and vectors"), np.dtype(np.float16)
    for group in table.batches([column]):
        matrix = matrix_column(group, column)
        dtype = matrix.dtype
        file.write(np.ascontiguousarray(matrix).data)
    return np.frombuffer(file.map(), dtype).reshape(table.rows, table.width(column))
