"""Parquet shards: written by row groups, read by column chunks whose checksums are verified; columns as NumPy arrays.

The last part reads fixed-size lists without nulls from plain pages. For wide lists, Arrow spends most of its time on
the levels of the values, which mark where lists start. A page without nulls has a single run of levels, and the width
of the lists is known, so decompression is enough.
"""

import contextlib
import itertools
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from schemas import storage
from schemas.layout import shard_name
from schemas.manifest import Shard, describe_file
from schemas.mapped import MappedFile
from schemas.ragged import Ragged
from schemas.shard_files import ranges
from schemas.shard_files.ranges import VERIFIED, Access, FetchedRanges, FetchedRangesFile, OpenShard, Range, Source
from schemas.storage import crc32, join

EXTENSION = "parquet"
_ENDING = struct.Struct("<I4s")  # the length of the footer's metadata, and the magic
_MAGIC = b"PAR1"
_NUMBERS = {name: name for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")}
_NUMBERS |= {"halffloat": "float16", "float": "float32", "double": "float64"}
_CHUNK_BYTES = 900  # parsed metadata of a column chunk in memory


def encode(table: pa.Table, row_group_rows: int | Sequence[int]) -> pa.Buffer:
    """Return `table` as Parquet bytes; `row_group_rows`: number of rows in every row group but the last, or in each."""
    out = pa.BufferOutputStream()
    with contextlib.closing(ShardWriter(out, table.schema, row_group_rows)) as writer:
        writer.write(table)
    return out.getvalue()


class ShardWriter:
    """Writes one shard to an Arrow output stream; all row groups but the last have exactly `row_group_rows` rows.

    `row_group_rows` may also be a sequence, one number per row group.
    """

    entry: Shard  # the manifest's entry, set once the shard is published

    def __init__(self, out: pa.NativeFile, schema: pa.Schema, row_group_rows: int | Sequence[int]) -> None:
        self._writer = pq.ParquetWriter(
            out,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=_leaves_that_repeat(schema),
            # Scores of negatives compress better byte by byte (docs/decisions/0048).
            column_encoding={
                f"{each.name}.list.element": "BYTE_STREAM_SPLIT"
                for each in schema
                if each.name in ("scores", "teacher") and pa.types.is_fixed_size_list(each.type)
            },
            write_statistics=False,
            write_page_checksum=True,  # damaged compressed bytes can decode to wrong values without an error
            store_schema=True,
        )
        self._schema = schema
        self._sizes = iter(row_group_rows) if isinstance(row_group_rows, Sequence) else itertools.repeat(row_group_rows)
        self._size = next(self._sizes, 1)
        self._pending = schema.empty_table()
        self.rows = 0

    def write(self, table: pa.Table) -> None:
        """Append rows; a row group is written as soon as it is full."""
        self.rows += table.num_rows
        pending = pa.concat_tables([self._pending, table.cast(self._schema)])
        start = 0
        while pending.num_rows - start >= self._size:
            self._flush(pending.slice(start, self._size))
            start += self._size
            self._size = next(self._sizes, 1)
        self._pending = pending.slice(start)

    def close(self) -> None:
        """Write the rows of the last row group, and the footer."""
        self._flush(self._pending)
        self._writer.close()

    def _flush(self, rows: pa.Table) -> None:
        if rows.num_rows:
            self._writer.write_table(rows.combine_chunks(), row_group_size=rows.num_rows)


def write_shard(url: str, index: int, count: int, table: pa.Table, row_group_rows: int | Sequence[int]) -> Shard:
    """Publish shard `index` of `count` under the prefix `url`, whole or not at all. Raises StorageError."""
    with writing_shard(url, index, count, table.schema, row_group_rows) as encoder:
        encoder.write(table)
    return encoder.entry


def _checksums_of(data: memoryview) -> str:
    """Return the CRC-32 of a shard's footer and of every column chunk in each row group, packed for the manifest."""
    size, _ = _ENDING.unpack(data[-_ENDING.size :])
    metadata = pq.read_metadata(pa.BufferReader(data))
    sums = [crc32(data[-_ENDING.size - size :])]
    for group in range(metadata.num_row_groups):
        columns = metadata.row_group(group)
        for leaf in range(metadata.num_columns):
            start, stop = _chunk(columns.column(leaf))
            sums.append(crc32(data[start:stop]))
    return storage.pack(sums)


@contextlib.contextmanager
def writing_shard(
    url: str, index: int, count: int, schema: pa.Schema, row_group_rows: int | Sequence[int]
) -> Iterator[ShardWriter]:
    """Yield the writer of shard `index` of `count` under the prefix `url`; the shard is published whole or not at all.

    At most one row group is in memory. The writer's `entry` is set after the block; after an error nothing is
    published. Raises StorageError.
    """
    name = shard_name(index, count)
    with storage.writing(join(url, name)) as path:
        with pa.OSFile(path, "wb") as out, contextlib.closing(ShardWriter(out, schema, row_group_rows)) as encoder:
            yield encoder
        data = memoryview(MappedFile(path).buffer)
        entry = describe_file(path, name, encoder.rows, _checksums_of(data))
        groups = tuple(row_group_rows) if isinstance(row_group_rows, Sequence) else None
        encoder.entry = entry.model_copy(update={"groups": groups})


class ParquetShard(OpenShard):
    """An open Parquet file; its footer is parsed once.

    `expected`: checksums from the manifest; None: the pages' own checksums are verified.
    """

    def __init__(self, source: Source, length: int, expected: str | None, verify: bool = True) -> None:
        super().__init__(source)
        self._length = length
        footer, _ = ranges.read_end(source, length, _ENDING, _MAGIC)
        self._chunks: np.ndarray | None = None
        if expected is not None and verify:
            sums = storage.unpack(expected)
            if crc32(footer) != sums[0]:
                raise ValueError("its footer does not match its CRC-32")
            self._chunks = sums[1:]
        self._pages = verify and expected is None
        self._metadata = pq.read_metadata(pa.BufferReader(footer))
        leaves = [self._metadata.schema.column(leaf).path for leaf in range(self._metadata.num_columns)]
        self._columns = [path.partition(".")[0] for path in leaves]
        if self._chunks is not None and len(self._chunks) != self._metadata.num_row_groups * len(leaves):
            raise ValueError(f"{len(self._chunks)} checksums for {self._metadata.num_row_groups} row groups")
        # Opening costs as much as reading a few hundred rows, and an open file serves one thread at a time.
        self._idle: deque[tuple[pq.ParquetFile, FetchedRangesFile | None]] = deque()
        self.schema_arrow = self._metadata.schema.to_arrow_schema()
        self.num_row_groups = int(self._metadata.num_row_groups)
        self.memory = _CHUNK_BYTES * self.num_row_groups * len(self._columns)

    def ranges(self, group: int, columns: Sequence[str] | None = None) -> list[Range]:
        """Return the byte ranges of the chunks of `columns` in row group `group`, in file order."""
        return [chunk for _, chunk in self._chunk_ranges(group, columns)]

    def read_row_group(
        self, group: int, columns: Sequence[str] | None = None, pieces: FetchedRanges | None = None
    ) -> pa.Table:
        held = self._source if isinstance(self._source, MappedFile) else pieces or self.fetch(group, columns)
        plain: dict[str, pa.Array] = {}
        for leaf, (start, stop) in self._chunk_ranges(group, columns):
            data, name = held.read(start, stop), self._columns[leaf]
            if self._chunks is None:
                continue
            if crc32(data) != self._chunks[group * len(self._columns) + leaf]:
                raise ValueError(f"the values of {name} do not match their CRC-32")
            kind = self.schema_arrow.field(name).type
            matrix = read_matrix(data, self._metadata, group, leaf, kind) if pa.types.is_fixed_size_list(kind) else None
            if matrix is not None:
                plain[name] = matrix
        schema = self.schema_arrow
        names = [name for name in (schema.names if columns is None else columns) if name in schema.names]
        by_arrow = [name for name in names if name not in plain]
        table = self._read_by_arrow(group, by_arrow, held) if by_arrow or not plain else None
        if table is None or plain:
            read = [plain[name] if table is None or name in plain else table.column(name) for name in names]
            table = pa.table(read, schema=pa.schema([schema.field(name) for name in names]))
        return table

    def close(self) -> None:
        self._idle.clear()

    def _read_by_arrow(self, group: int, columns: list[str], held: MappedFile | FetchedRanges) -> pa.Table:
        file, opened = self._idle.pop() if self._idle else self._open()
        if isinstance(held, FetchedRanges) and opened is not None:
            opened.pieces = held
        table = file.read_row_group(group, columns=columns, use_threads=False)
        if opened is not None:
            opened.pieces = FetchedRanges(())
        self._idle.append((file, opened))
        return table

    def _chunk_ranges(self, group: int, columns: Sequence[str] | None) -> list[tuple[int, Range]]:
        """Return the leaf numbers of `columns` in row group `group`, each with its byte range."""
        chunks = self._metadata.row_group(group)
        leaves = [leaf for leaf, name in enumerate(self._columns) if columns is None or name in columns]
        return [(leaf, _chunk(chunks.column(leaf))) for leaf in leaves]

    def _open(self) -> tuple[pq.ParquetFile, FetchedRangesFile | None]:
        options = {"metadata": self._metadata, "pre_buffer": False, "page_checksum_verification": self._pages}
        if isinstance(self._source, MappedFile):
            return pq.ParquetFile(pa.BufferReader(self._source.buffer), **options), None
        pieces = FetchedRangesFile(self._length)
        return pq.ParquetFile(pa.PythonFile(pieces, "r"), **options), pieces


def open_shard(url: str, shard: Shard, access: Access = VERIFIED) -> ParquetShard:
    """Open one shard for reading row groups. Raises TableError if the shard is missing, truncated, or not Parquet."""
    with ranges.opening(url, shard, access) as source:
        return ParquetShard(source, shard.bytes, shard.checksums, access.verify)


def _chunk(column: pq.ColumnChunkMetaData) -> Range:
    start = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    return start, start + column.total_compressed_size


def list_column(table: pa.Table, name: str) -> Ragged:
    """Return a column of lists, of variable or fixed size, as NumPy arrays; the offsets are int64 and start at 0."""
    column = _array(table, name)
    if pa.types.is_fixed_size_list(column.type):
        return Ragged.from_matrix(matrix_column(table, name))
    offsets = _numbers(column.offsets).astype(np.int64)
    return Ragged(_numbers(column.values)[offsets[0] : offsets[-1]], offsets - offsets[0])


def number_column(table: pa.Table, name: str) -> np.ndarray:
    """Return a column of numbers as a NumPy array."""
    return _numbers(_array(table, name))


def _numbers(column: pa.Array) -> np.ndarray:
    """Return a NumPy view of a numeric column; Arrow's conversion would load pandas, which takes 0.2 s."""
    if column.null_count or str(column.type) not in _NUMBERS:
        return column.to_numpy(zero_copy_only=False)
    _, data = column.buffers()
    return np.frombuffer(data or b"", _NUMBERS[str(column.type)])[column.offset :][: len(column)]


def string_bytes(column: pa.Array) -> Ragged:
    """View a column of strings or bytes without nulls, with 32-bit or 64-bit offsets, as the bytes of each row."""
    _, offsets, data = column.buffers()
    is_large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    bounds = np.frombuffer(offsets, np.int64 if is_large else np.int32)[column.offset :][: len(column) + 1]
    bounds = bounds.astype(np.int64)
    return Ragged(np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]], bounds - bounds[0])


def filters_of(table: pa.Table) -> Ragged:
    """Return the label ids to remove from each query's predictions; empty rows if the column is absent."""
    name = "filter_label_ids"
    return list_column(table, name) if name in table.column_names else Ragged.empty(table.num_rows)


def matrix_column(table: pa.Table, name: str) -> np.ndarray:
    """Return a fixed-size list column as a NumPy matrix [rows, K]."""
    column = _array(table, name)
    width = column.type.list_size
    values = column.values.slice(column.offset * width, len(column) * width)  # flatten() would copy the values
    return _numbers(values).reshape(-1, width)


def _array(table: pa.Table, name: str) -> pa.Array:
    """Return a column as one array; only a column in several pieces is copied."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays([pa.nulls(0, column.type), *column.chunks])


def list_array(values: np.ndarray, offsets: np.ndarray, type: pa.DataType) -> pa.ListArray:
    """Make a list column from NumPy values [V] and offsets [rows + 1]."""
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values, type))


def matrix_array(matrix: np.ndarray, type: pa.DataType) -> pa.FixedSizeListArray:
    """Make a fixed-size list column from a NumPy matrix [rows, K]."""
    flat = pa.array(np.ascontiguousarray(matrix).reshape(-1), type)
    return pa.FixedSizeListArray.from_arrays(flat, matrix.shape[1])


def _leaves_that_repeat(schema: pa.Schema) -> list[str]:
    """Return the leaves to write with a dictionary; for row ids or floats, a dictionary would only cost time."""
    leaves = []
    for field in schema:
        is_list = pa.types.is_list(field.type)
        floats = is_list and pa.types.is_floating(field.type.value_type)
        if not (field.name == "query_id" or pa.types.is_fixed_size_list(field.type) or floats):
            leaves.append(f"{field.name}.list.element" if is_list else field.name)
    return leaves


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
