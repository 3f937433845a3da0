"""Shards as WebDataset tars, with an index behind the end of the archive: any tar reader stops before it.

The index is an Arrow IPC file with a record batch a row group: how many values each member of each row holds. From that
follows by arithmetic where every value lies, so a row group is one range read and a few gathers. Its metadata holds the
byte at which the row group starts, the id of its first row, and a CRC-32 of each column's values. The manifest has that
of the index.

    tar entries | two zero blocks | index | CRC-32 of the index, its length, magic
"""

import json
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from schemas import checksums, storage
from schemas.checksums import crc32
from schemas.layout import shard_name
from schemas.manifest import Shard, describe_file
from schemas.ragged import Ragged, offsets_of
from schemas.shard_files import ranges, tar
from schemas.shard_files.base import OpenShard
from schemas.shard_files.parquet import list_column, string_bytes
from schemas.shard_files.ranges import VERIFIED, Access, Pieces, Range, Source
from schemas.storage import join

EXTENSION = "tar"
_MAGIC = b"XTARIDX1"
_FOOTER = struct.Struct("<IQ8s")


def write_shard(url: str, index: int, count: int, table: pa.Table, row_group_rows: int) -> Shard:
    """Publish shard `index` of `count` under the prefix `url`, whole or not at all; holds a row group at a time.

    `query_id` must count up by one; strings and lists of numbers are the other columns.
    Raises StorageError; ValueError for other columns and ids.
    """
    name = shard_name(index, count, EXTENSION)
    with storage.writing(join(url, name)) as path:
        with open(path, "wb") as out:
            for piece in encode(table, row_group_rows):
                out.write(piece)
        # Of the last piece without the footer: a CRC-32 over bytes and their own CRC-32 is the same for all bytes.
        packed = checksums.pack([crc32(piece[: -_FOOTER.size])])
        return describe_file(path, name, table.num_rows, packed)


def encode(table: pa.Table, row_group_rows: int) -> Iterator[memoryview]:
    """Yield `table` as the bytes of a tar, a piece a row group, and of its index, the last piece.

    Raises ValueError as `write_shard`.
    """
    members = tar.members_of(table.schema)
    if (np.diff(table.column("query_id").to_numpy()) != 1).any():
        raise ValueError("the ids of a shard count up by one")
    schema = pa.schema(
        [(member.column, pa.uint32()) for member in members],
        metadata={"schema": table.schema.serialize().to_pybytes()},
    )
    out = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    start = 0
    with pa.ipc.new_file(out, schema, options=options) as index:
        for first in range(0, table.num_rows, row_group_rows):
            rows = table.slice(first, row_group_rows)
            ids = rows.column("query_id").to_numpy()
            columns = {member.column: _ragged(rows, member.column) for member in members}
            facts = {
                "start": start,
                "first_id": int(ids[0]),
                "crc32": {name: crc32(np.ascontiguousarray(column.values).data) for name, column in columns.items()},
            }
            counts = [pa.array(columns[member.column].counts.astype(np.uint32)) for member in members]
            batch = pa.record_batch(counts, schema=schema)
            index.write_batch(batch, {"facts": json.dumps(facts, sort_keys=True)})
            piece = tar.encode(ids, columns, members).data
            start += len(piece)
            yield piece
    content = out.getvalue()
    yield memoryview(tar.END)
    yield memoryview(content.to_pybytes() + _FOOTER.pack(crc32(content), len(content), _MAGIC))


class TarShard(OpenShard):
    """An open tar. Raises ValueError over damaged bytes."""

    def __init__(self, source: Source, length: int, expected: str | None, verify: bool = True) -> None:
        super().__init__(source)
        self._verify, self._length = verify, length
        content = _index(source, length, expected, verify)
        self.memory = content.size
        self._index = pa.ipc.open_file(pa.BufferReader(content))
        self._lock = threading.Lock()  # Arrow does not say that threads may share its reader
        metadata = self._index.schema.metadata or {}
        if b"schema" not in metadata:
            raise ValueError("its index names no columns")
        self.schema_arrow = pa.ipc.read_schema(pa.BufferReader(metadata[b"schema"]))
        self._members = tar.members_of(self.schema_arrow)
        self.num_row_groups = int(self._index.num_record_batches)

    def ranges(self, group: int, columns: Sequence[str] | None = None) -> list[Range]:
        """Return the bytes of row group `group`: its columns lie among each other."""
        return self._group(group).ranges(self._names(columns))

    def read_row_group(
        self, group: int, columns: Sequence[str] | None = None, pieces: Pieces | None = None
    ) -> pa.Table:
        """Read row group `group`, with those of `columns` that exist in the order of the schema."""
        facts = self._group(group)
        names = self._names(columns)
        data = np.empty(0, np.uint8)
        for start, stop in facts.ranges(names):
            data = np.frombuffer((pieces or self._source).read(start, stop), np.uint8)
        arrays = [self._column(facts, name, data) for name in names]
        return pa.Table.from_arrays(arrays, schema=pa.schema([self.schema_arrow.field(name) for name in names]))

    def _names(self, columns: Sequence[str] | None) -> list[str]:
        return [name for name in self.schema_arrow.names if columns is None or name in columns]

    def _group(self, group: int) -> "_Group":
        with self._lock:
            batch, metadata = self._index.get_batch_with_custom_metadata(group)
        facts = json.loads(metadata[b"facts"])
        counts = {member.column: batch.column(member.column).to_numpy() for member in self._members}
        layout = tar.Layout.of(self._members, counts)
        if facts["start"] < 0 or facts["start"] + layout.blocks * tar.BLOCK > self._length:
            raise ValueError("its index points beyond its end")
        return _Group(batch.num_rows, facts["start"], facts["first_id"], facts["crc32"], counts, layout)

    def _column(self, group: "_Group", name: str, data: np.ndarray) -> pa.Array:
        if name == "query_id":
            return pa.array(np.arange(group.first_id, group.first_id + group.rows))
        number = [member.column for member in self._members].index(name)
        offsets = offsets_of(group.counts[name])
        member = self._members[number]
        values = data.view(member.dtype)[group.layout.places(number, member, offsets)]
        if self._verify and crc32(values.data) != group.crc32[name]:
            raise ValueError(f"the values of {name} do not match their CRC-32")
        return _array(values, offsets, self.schema_arrow.field(name).type)


@dataclass(frozen=True)
class _Group:
    """Entry of the index for a row group of B rows: `counts` [B] by column, and the layout of the values."""

    rows: int
    start: int
    first_id: int
    crc32: dict[str, int]
    counts: dict[str, np.ndarray]
    layout: tar.Layout

    def ranges(self, names: list[str]) -> list[Range]:
        return [(self.start, self.start + self.layout.blocks * tar.BLOCK)] if set(names) - {"query_id"} else []


def open_shard(url: str, shard: Shard, access: Access = VERIFIED) -> TarShard:
    """Open one shard for reading row groups. Raises TableError when it is gone, cut short, or without its index."""
    with ranges.opening(url, shard, access) as source:
        return TarShard(source, shard.bytes, shard.checksums, access.verify)


def _index(source: Source, length: int, expected: str | None, verify: bool) -> pa.Buffer:
    """Read the index behind the archive; verified by the manifest's CRC-32 and its own. Raises ValueError."""
    end, (checksum, size) = ranges.read_end(source, length, _FOOTER, _MAGIC)
    content = end[:size]
    if verify:
        actual = crc32(content)
        if expected is not None and actual != checksums.unpack(expected)[0]:
            raise ValueError("its index does not match the manifest's CRC-32")
        if actual != checksum:
            raise ValueError("its index does not match its CRC-32")
    return content


def _ragged(rows: pa.Table, name: str) -> Ragged:
    """Return a list column, or a column of strings as their UTF-8 bytes."""
    if not pa.types.is_string(rows.schema.field(name).type):
        return list_column(rows, name)
    return string_bytes(pa.concat_arrays(rows.column(name).chunks))


def _array(values: np.ndarray, offsets: np.ndarray, type: pa.DataType) -> pa.Array:
    numbers = pa.array(offsets.astype(np.int32))
    if pa.types.is_string(type):
        return pa.StringArray.from_buffers(len(offsets) - 1, numbers.buffers()[1], pa.py_buffer(values))
    return pa.ListArray.from_arrays(numbers, pa.array(values, type.value_type), type=type)
