"""Fast reading of fixed-size lists without nulls from Parquet pages with plain values.

For wide lists, Arrow spends most of its time on the levels of the values, which mark where lists start. A page without
nulls has a single run of levels, and the width of the lists is known, so decompression is enough.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_DATA_PAGE, _PLAIN = 0, 0
_LENGTH = 4  # bytes of the length field before the levels
# Fields of a page's header, and of the data page header inside (parquet.thrift).
_TYPE, _UNCOMPRESSED, _COMPRESSED, _DATA, _VALUES, _ENCODING = 1, 2, 3, 5, 1, 2


def read_matrix(
    chunk: pa.Buffer, metadata: pq.FileMetaData, group: int, leaf: int, kind: pa.FixedSizeListType
) -> pa.Array | None:
    """Return the lists of a column chunk; None if Arrow must read the chunk, because pages are damaged or not plain.

    The chunk belongs to column `leaf` in row group `group`. Raises OSError or ValueError if bytes do not decompress.
    """
    rows, column = metadata.row_group(group).num_rows, metadata.schema.column(leaf)
    levels = column.max_repetition_level, column.max_definition_level
    out = np.empty(rows * kind.list_size * kind.value_type.bit_width // 8, np.uint8)
    try:
        if not _copy_values(chunk, metadata.row_group(group).column(leaf), levels, kind, out):
            return None
    except (IndexError, KeyError, TypeError, RecursionError):  # an invalid header
        return None
    flat = pa.Array.from_buffers(kind.value_type, rows * kind.list_size, [None, pa.py_buffer(out)])
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)


def _copy_values(
    chunk: pa.Buffer,
    column: pq.ColumnChunkMetaData,
    levels: tuple[int, int],
    kind: pa.FixedSizeListType,
    out: np.ndarray,
) -> bool:
    """Copy the values of all pages to `out`; return whether the number of values is as expected."""
    data, position, filled = memoryview(chunk).cast("B"), 0, 0
    while position < len(data):
        header, position = _struct(data, position)
        page, compressed, length = header[_DATA], header[_COMPRESSED], header[_UNCOMPRESSED]
        size = page[_VALUES] * kind.value_type.bit_width // 8
        is_plain = header[_TYPE] == _DATA_PAGE and page[_ENCODING] == _PLAIN and page[_VALUES] % kind.list_size == 0
        # A run of levels takes a few bytes, and a page has at most two runs per list.
        if not is_plain or not 0 <= size <= len(out) - filled or not size <= length <= 9 * size + 64 or compressed < 0:
            return False
        body, position = chunk.slice(position, compressed), position + compressed
        if column.compression != "UNCOMPRESSED":
            body = pa.decompress(body, length, column.compression.lower())
        values = _without_levels(memoryview(body).cast("B"), page[_VALUES], *levels)
        if values is None or len(values) != size:
            return False
        out[filled : filled + size] = values
        filled += size
    return filled == len(out)


def _without_levels(page: memoryview, values: int, repeated: int, defined: int) -> np.ndarray | None:
    """Return the bytes of a page's values; None if a value may be missing."""
    start = _LENGTH + int.from_bytes(page[:_LENGTH], "little") if repeated else 0
    if defined:
        length = int.from_bytes(page[start : start + _LENGTH], "little")
        run, end = _varint(page, start + _LENGTH)
        start += _LENGTH + length
        if run != values << 1 or end + 1 != start or page[end] != defined:  # not one run without nulls
            return None
    return np.frombuffer(page[start:], np.uint8)


def _struct(data: memoryview, position: int) -> tuple[dict[int, Any], int]:
    """Parse a struct of Thrift's compact protocol; return ({field: value}, end). Raises IndexError, KeyError."""
    fields: dict[int, Any] = {}
    field = 0
    while byte := data[position]:
        position, kind = position + 1, byte & 15
        if byte >> 4:
            field += byte >> 4
        else:
            field, position = _integer(data, position)
        if kind in (1, 2):  # true, false
            fields[field] = kind == 1
        elif kind in (4, 5, 6):  # integers of 16, 32 and 64 bits
            fields[field], position = _integer(data, position)
        elif kind == 8:  # bytes
            length, position = _varint(data, position)
            fields[field], position = data[position : position + length], position + length
        elif kind == 12:
            fields[field], position = _struct(data, position)
        else:
            raise KeyError(f"a page's header has a field of kind {kind}")
    return fields, position + 1


def _integer(data: memoryview, position: int) -> tuple[int, int]:
    value, position = _varint(data, position)
    return value >> 1 ^ -(value & 1), position


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Parse an unsigned number, stored as 7 bits per byte; return (number, end)."""
    value = 0
    for shift in range(0, 64, 7):
        byte = data[position]
        value, position = value | (byte & 127) << shift, position + 1
        if byte < 128:
            return value, position
    raise IndexError("a number of more than 64 bits")
