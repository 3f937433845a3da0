"""Fixed-size lists without nulls, copied from Parquet pages that hold their values as they are.

Arrow goes through the levels of every value to find the lists: of wide lists that is most of the time. A page without
nulls says so in one run of levels, and the width of the lists is known, so only decompressing is left.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_DATA_PAGE, _PLAIN = 0, 0
_LENGTH = 4  # bytes that say how long levels are, before them
# Fields of a page's header, and of the header within for data (parquet.thrift).
_TYPE, _UNCOMPRESSED, _COMPRESSED, _DATA, _VALUES, _ENCODING = 1, 2, 3, 5, 1, 2


def read_matrix(
    chunk: pa.Buffer, column: pq.ColumnChunkMetaData, levels: tuple[int, int], kind: pa.FixedSizeListType, rows: int
) -> pa.Array | None:
    """Return the `rows` lists of a column chunk; None where its pages are of another kind, which Arrow is to read.

    `levels`: of repetition and of definition, at most. Raises ValueError, IndexError or OSError for damaged bytes.
    """
    data, position = memoryview(chunk).cast("B"), 0
    out, filled = np.empty(rows * kind.list_size * kind.value_type.bit_width // 8, np.uint8), 0
    while position < len(data):
        header, position = _struct(data, position)
        page = header.get(_DATA)
        if header[_TYPE] != _DATA_PAGE or page is None or page[_ENCODING] != _PLAIN:
            return None
        size = page[_VALUES] * kind.value_type.bit_width // 8
        if filled + size > len(out) or page[_VALUES] % kind.list_size:
            return None
        body, position = chunk.slice(position, header[_COMPRESSED]), position + header[_COMPRESSED]
        if column.compression != "UNCOMPRESSED":
            body = pa.decompress(body, header[_UNCOMPRESSED], column.compression.lower())
        held = _without_levels(memoryview(body).cast("B"), page[_VALUES], *levels)
        if held is None or len(held) != size:
            return None
        out[filled : filled + size] = held
        filled += size
    if filled < len(out):
        return None
    flat = pa.Array.from_buffers(kind.value_type, rows * kind.list_size, [None, pa.py_buffer(out)])
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)


def _without_levels(page: memoryview, values: int, repeated: int, defined: int) -> np.ndarray | None:
    """Return the bytes of a page's values; None where a value may be missing."""
    start = _LENGTH + int.from_bytes(page[:_LENGTH], "little") if repeated else 0
    if defined:
        length = int.from_bytes(page[start : start + _LENGTH], "little")
        run, end = _varint(page, start + _LENGTH)
        start += _LENGTH + length
        if run != values << 1 or end + 1 != start or page[end] != defined:  # one run of values that are all there
            return None
    return np.frombuffer(page[start:], np.uint8)


def _struct(data: memoryview, position: int) -> tuple[dict[int, Any], int]:
    """Parse a struct of Thrift's compact protocol: {field: value}, and where it ends. Raises ValueError, IndexError."""
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
            raise ValueError(f"a page's header has a field of kind {kind}")
    return fields, position + 1


def _integer(data: memoryview, position: int) -> tuple[int, int]:
    value, position = _varint(data, position)
    return value >> 1 ^ -(value & 1), position


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return an unsigned number, 7 bits a byte, and where it ends."""
    value, shift = 0, 0
    while True:
        byte = data[position]
        value, position = value | (byte & 127) << shift, position + 1
        if byte < 128:
            return value, position
        shift += 7
