"""Shards as WebDataset tars, with an index after the end of the archive, which tar readers ignore.

The key of a sample is the zero-padded id of the row. A sample has one member per column: `000000000007.input_ids.npy`
for a list of numbers, `.key.txt` for a string. The format is POSIX ustar in blocks of 512 bytes, with time and owner 0
for deterministic bytes. NumPy lays out headers, members and padding of all samples at once.

The index is an Arrow IPC file with one record batch per row group, which contains the number of values in each member
of each row, and the columns of whole numbers, which are no members. From the numbers of values follows the position of
every value, so reading a row group takes one range read and a few gathers. The metadata of a batch contains the start
of the row group in bytes, its first row's id, and a CRC-32 of each column. The manifest has the CRC-32 of the index.

    tar entries | two zero blocks | index | CRC-32 of the index, its length, magic
"""

import json
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from schemas import storage
from schemas.layout import shard_name
from schemas.manifest import Shard, describe_file
from schemas.ragged import Ragged, offsets_of
from schemas.shard_files import ranges
from schemas.shard_files.parquet import list_column, string_bytes
from schemas.shard_files.ranges import VERIFIED, Access, FetchedRanges, OpenShard, Range, Source
from schemas.storage import crc32, join

EXTENSION = "tar"
_MAGIC = b"XTARIDX1"
_FOOTER = struct.Struct("<IQ8s")
BLOCK = 512
END = bytes(2 * BLOCK)  # two zero blocks end an archive
ID_DIGITS = 12
_NPY_HEAD = 128
_LONGEST_NAME = 100
_SIZE = slice(124, 135)  # eleven octal digits
_CHECKSUM = slice(148, 154)  # six octal digits


@dataclass(frozen=True)
class Member:
    """A column as a member of every sample: values of `dtype` after `head` header bytes (.npy header, or 0)."""

    column: str
    dtype: np.dtype
    head: int

    @property
    def suffix(self) -> str:
        return f"{self.column}.{'npy' if self.head else 'txt'}"


@dataclass(frozen=True)
class TarLayout:
    """Layout of the members of B samples: `starts` int64 [B, M], counted in blocks, and the total of `blocks`."""

    starts: np.ndarray
    blocks: int

    @classmethod
    def of(cls, members: Sequence[Member], counts: Mapping[str, np.ndarray]) -> "TarLayout":
        """Lay out rows; `counts` contains, for each column, the number of values in each row, [B]."""
        sizes = np.stack([_size(member, counts[member.column]) for member in members], axis=1)
        blocks = 1 + -(-sizes // BLOCK)
        ends = np.cumsum(blocks.reshape(-1))
        return cls((ends - blocks.reshape(-1)).reshape(blocks.shape), int(ends[-1]) if len(ends) else 0)

    def value_positions(self, number: int, member: Member, offsets: np.ndarray) -> np.ndarray:
        """Return the positions int64 [V] of all values of `member`, which is number `number`, in units of values.

        `offsets` [B + 1]: offsets of the values of each sample.
        """
        starts = ((self.starts[:, number] + 1) * BLOCK + member.head) // member.dtype.itemsize
        return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], np.diff(offsets))


def write_shard(url: str, index: int, count: int, table: pa.Table, row_group_rows: int) -> Shard:
    """Publish shard `index` of `count` under the prefix `url`, whole or not at all; holds one row group in memory.

    `query_id` must increase by one per row; the other columns are strings, whole numbers or lists of numbers. Raises
    StorageError; ValueError for other columns and ids.
    """
    name = shard_name(index, count, EXTENSION)
    with storage.writing(join(url, name)) as path:
        with open(path, "wb") as out:
            for piece in encode(table, row_group_rows):
                out.write(piece)
        # The footer is left out, because a CRC-32 over bytes and their own CRC-32 is a constant.
        packed = storage.pack([crc32(piece[: -_FOOTER.size])])
        return describe_file(path, name, table.num_rows, packed)


def encode(table: pa.Table, row_group_rows: int) -> Iterator[memoryview]:
    """Yield the bytes of a tar of `table`, one piece per row group, and then the bytes of its index.

    Raises ValueError for the same reasons as `write_shard`.
    """
    members = members_of(table.schema)
    if (np.diff(table.column("query_id").to_numpy()) != 1).any():
        raise ValueError("the ids of a shard must increase by 1")
    numbers = [field for field in table.schema if pa.types.is_integer(field.type) and field.name != "query_id"]
    schema = pa.schema(
        [*((member.column, pa.uint32()) for member in members), *numbers],
        metadata={"schema": table.schema.serialize().to_pybytes()},
    )
    out = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    start = 0
    with pa.ipc.new_file(out, schema, options=options) as index:
        for first in range(0, table.num_rows, row_group_rows):
            rows = table.slice(first, row_group_rows)
            ids = rows.column("query_id").to_numpy()
            columns = {
                member.column: list_column(rows, member.column)
                if member.head
                else string_bytes(pa.concat_arrays(rows.column(member.column).chunks))
                for member in members
            }
            facts = {
                "start": start,
                "first_id": int(ids[0]),
                "crc32": {name: crc32(np.ascontiguousarray(column.values).data) for name, column in columns.items()},
            }
            counts = [pa.array(columns[member.column].counts.astype(np.uint32)) for member in members]
            others = [pa.concat_arrays(rows.column(field.name).chunks) for field in numbers]
            batch = pa.record_batch([*counts, *others], schema=schema)
            index.write_batch(batch, {"facts": json.dumps(facts, sort_keys=True)})
            piece = _encode_group(ids, columns, members).data
            start += len(piece)
            yield piece
    content = out.getvalue()
    yield memoryview(END)
    yield memoryview(content.to_pybytes() + _FOOTER.pack(crc32(content), len(content), _MAGIC))


class _Group(NamedTuple):
    """Index entry of a row group of B rows: byte range, metadata, `counts` [B] by column (or numbers), and layout."""

    place: Range
    facts: dict[str, Any]
    counts: dict[str, np.ndarray]
    layout: TarLayout


class TarShard(OpenShard):
    """An open tar. Raises ValueError for damaged bytes."""

    def __init__(self, source: Source, length: int, expected: str | None, verify: bool = True) -> None:
        super().__init__(source)
        self._verify, self._length = verify, length
        content = _index(source, length, expected, verify)
        self.memory = content.size
        self._index = pa.ipc.open_file(pa.BufferReader(content))
        self._lock = threading.Lock()  # Arrow does not promise that threads may share its reader
        metadata = self._index.schema.metadata or {}
        if b"schema" not in metadata:
            raise ValueError("the index has no columns")
        self.schema_arrow = pa.ipc.read_schema(pa.BufferReader(metadata[b"schema"]))
        self._members = members_of(self.schema_arrow)
        self._indexed = {*self.schema_arrow.names} - {member.column for member in self._members}
        self.num_row_groups = int(self._index.num_record_batches)

    def ranges(self, group: int, columns: Sequence[str] | None = None) -> list[Range]:
        """Return the byte range of row group `group` with all its columns."""
        return [self._group(group).place] if {*self._names(columns)} - self._indexed else []

    def read_row_group(
        self, group: int, columns: Sequence[str] | None = None, pieces: FetchedRanges | None = None
    ) -> pa.Table:
        """Read the existing `columns` of row group `group`, in the order of the schema."""
        found, names, data = self._group(group), self._names(columns), np.empty(0, np.uint8)
        if {*names} - self._indexed:
            data = np.frombuffer((pieces or self._source).read(*found.place), np.uint8)
        arrays = [self._column(found, name, data) for name in names]
        return pa.Table.from_arrays(arrays, schema=pa.schema([self.schema_arrow.field(name) for name in names]))

    def _names(self, columns: Sequence[str] | None) -> list[str]:
        return [name for name in self.schema_arrow.names if columns is None or name in columns]

    def _group(self, group: int) -> _Group:
        with self._lock:
            batch, metadata = self._index.get_batch_with_custom_metadata(group)
        facts = json.loads(metadata[b"facts"])
        counts = {name: batch.column(name).to_numpy() for name in batch.schema.names}
        layout = TarLayout.of(self._members, counts)
        start, stop = facts["start"], facts["start"] + layout.blocks * BLOCK
        if start < 0 or stop > self._length:
            raise ValueError("the index points past the end of the file")
        return _Group((start, stop), facts, counts, layout)

    def _column(self, group: _Group, name: str, data: np.ndarray) -> pa.Array:
        if name == "query_id":
            return pa.array(np.arange(len(group.layout.starts)) + group.facts["first_id"])
        if name in self._indexed:
            return pa.array(group.counts[name])
        number = [member.column for member in self._members].index(name)
        offsets = offsets_of(group.counts[name])
        member = self._members[number]
        values = data.view(member.dtype)[group.layout.value_positions(number, member, offsets)]
        if self._verify and crc32(values.data) != group.facts["crc32"][name]:
            raise ValueError(f"the values of {name} do not match their CRC-32")
        kind = self.schema_arrow.field(name).type
        if pa.types.is_fixed_size_list(kind) and (group.counts[name] != kind.list_size).any():
            raise ValueError(f"expected {kind.list_size} values in each row of {name}")
        return _array(values, offsets, kind)


def open_shard(url: str, shard: Shard, access: Access = VERIFIED) -> TarShard:
    """Open one shard for reading row groups.

    Raises TableError if the shard is missing, is truncated, or has no index.
    """
    with ranges.opening(url, shard, access) as source:
        return TarShard(source, shard.bytes, shard.checksums, access.verify)


def _index(source: Source, length: int, expected: str | None, verify: bool) -> pa.Buffer:
    """Read the index after the archive, and verify its CRC-32 in the manifest and in the file. Raises ValueError."""
    end, (checksum, size) = ranges.read_end(source, length, _FOOTER, _MAGIC)
    content = end[:size]
    if verify:
        actual = crc32(content)
        if expected is not None and actual != storage.unpack(expected)[0]:
            raise ValueError("its index does not match the manifest's CRC-32")
        if actual != checksum:
            raise ValueError("its index does not match its CRC-32")
    return content


def _array(values: np.ndarray, offsets: np.ndarray, type: pa.DataType) -> pa.Array:
    numbers = pa.array(offsets.astype(np.int32))
    if pa.types.is_fixed_size_list(type):
        return pa.FixedSizeListArray.from_arrays(pa.array(values, type.value_type), type=type)
    if pa.types.is_string(type):
        return pa.StringArray.from_buffers(len(offsets) - 1, numbers.buffers()[1], pa.py_buffer(values))
    return pa.ListArray.from_arrays(numbers, pa.array(values, type.value_type), type=type)


def members_of(schema: pa.Schema) -> list[Member]:
    """Return a member for every column except whole numbers, in order. Raises ValueError for other types."""
    members = []
    for field in (field for field in schema if not pa.types.is_integer(field.type)):
        is_list = pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type)
        value_type = field.type.value_type if is_list else pa.null()
        if pa.types.is_string(field.type):
            member = Member(field.name, np.dtype(np.uint8), 0)
        elif pa.types.is_integer(value_type) or pa.types.is_floating(value_type):
            member = Member(field.name, pa.array([], value_type).to_numpy().dtype, _NPY_HEAD)
        else:
            raise ValueError(
                f"column {field.name}: expected strings, whole numbers or lists of numbers, got {field.type}, which a "
                "tar cannot contain"
            )
        if ID_DIGITS + 1 + len(member.suffix) > _LONGEST_NAME:
            raise ValueError(f"column {field.name}: its name is too long for a tar")
        members.append(member)
    return members


def _encode_group(ids: np.ndarray, columns: Mapping[str, Ragged], members: list[Member]) -> np.ndarray:
    """Lay samples out as tar blocks: ids int64 [B] and B rows of each column -> uint8 [bytes].

    Raises ValueError if an id has more than 12 digits.
    """
    if ids.size and not 0 <= ids.min() <= ids.max() < 10**ID_DIGITS:
        raise ValueError(f"a sample's key has {ID_DIGITS} digits; got ids in [{ids.min()}, {ids.max()}]")
    counts = {name: column.counts for name, column in columns.items()}
    layout = TarLayout.of(members, counts)
    blocks = np.zeros((layout.blocks, BLOCK), np.uint8)
    digits = _ascii(ids, ID_DIGITS, 10)
    for number, member in enumerate(members):
        values, offsets = columns[member.column]
        count = counts[member.column]
        start = layout.starts[:, number]
        blocks[start] = _tar_headers(member, digits, _size(member, count))
        if member.head:
            blocks[start + 1, : member.head] = _npy_headers(member.dtype, count)
        blocks.reshape(-1).view(member.dtype)[layout.value_positions(number, member, offsets)] = values
    return blocks.reshape(-1)


def _size(member: Member, counts: np.ndarray) -> np.ndarray:
    return member.head + counts.astype(np.int64) * member.dtype.itemsize


def _tar_headers(member: Member, digits: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return headers uint8 [B, 512].

    The checksum is the sum of all bytes, where the checksum field is counted as spaces.
    """
    head = bytearray(BLOCK)
    head[ID_DIGITS : ID_DIGITS + 1 + len(member.suffix)] = b"." + member.suffix.encode()
    head[100:124] = b"0000644\0" + b"0000000\0" * 2  # mode, owner, group
    head[135:148] = b"\0" + b"00000000000\0"  # end of the size field, and the time
    head[148:156] = b" " * 8
    head[156:157] = b"0"  # a regular file
    head[257:265] = b"ustar\x0000"
    octal = _ascii(sizes, 11)
    sums = sum(head) + digits.sum(axis=1, dtype=np.int64) + octal.sum(axis=1, dtype=np.int64)
    headers = np.repeat(np.frombuffer(head, np.uint8)[None], len(digits), axis=0)
    headers[:, :ID_DIGITS] = digits
    headers[:, _SIZE] = octal
    headers[:, _CHECKSUM] = _ascii(sums, 6)
    headers[:, 154] = 0
    return headers


def _npy_headers(dtype: np.dtype, counts: np.ndarray) -> np.ndarray:
    """Return headers uint8 [B, 128] of .npy files (version 1.0) with `counts` [B] values each."""
    lengths, index = np.unique(counts, return_inverse=True)
    text = "{{'descr': {!r}, 'fortran_order': False, 'shape': ({},), }}"
    heads = [text.format(dtype.str, n).ljust(_NPY_HEAD - 11).encode() + b"\n" for n in lengths.tolist()]
    start = b"\x93NUMPY\x01\x00" + (_NPY_HEAD - 10).to_bytes(2, "little")
    return np.frombuffer(b"".join(start + head for head in heads), np.uint8).reshape(-1, _NPY_HEAD)[index]


def _ascii(numbers: np.ndarray, digits: int, base: int = 8) -> np.ndarray:
    return (numbers[:, None] // base ** np.arange(digits - 1, -1, -1) % base + ord("0")).astype(np.uint8)
