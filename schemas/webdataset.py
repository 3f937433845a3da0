"""Shards as WebDataset tars, with an index behind the end of the archive: any tar reader stops before it.

The index is an Arrow IPC file with a record batch a row group: how many values each member of each row holds. From that
follows by arithmetic where every value lies, so a row group is one range read and a few gathers. Its metadata holds the
byte at which the row group starts, the id of its first row, and a CRC-32 of each column's values.

    tar entries | two zero blocks | index | CRC-32 of the index, its length, magic
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from schemas import storage, tar
from schemas.layout import shard_name
from schemas.manifest import Shard, find_shard
from schemas.parquet import list_column, naming_damage
from schemas.storage import join

EXTENSION = "tar"
_MAGIC = b"XTARIDX1"
_FOOTER = struct.Struct("<IQ8s")
_TAIL = 1 << 16  # read at first: most indexes fit


def write_shard(url: str, index: int, count: int, table: pa.Table, row_group_rows: int) -> Shard:
    """Publish shard `index` of `count` under the prefix `url`, whole or not at all; holds a row group at a time.

    `query_id` must count up by one; strings and lists of numbers are the other columns.
    Raises StorageError; ValueError for other columns and ids.
    """
    name = shard_name(index, count, EXTENSION)
    digest, size = hashlib.sha256(), 0
    with storage.writing(join(url, name)) as path, open(path, "wb") as out:
        for piece in encode(table, row_group_rows):
            out.write(piece)
            digest.update(piece)
            size += len(piece)
    return Shard(path=name, rows=table.num_rows, bytes=size, sha256=digest.hexdigest())


def encode(table: pa.Table, row_group_rows: int) -> Iterator[memoryview]:
    """`table` as the bytes of a tar and its index, a piece a row group. Raises ValueError as `write_shard`."""
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
            ids, columns = _columns(table.slice(first, row_group_rows), members)
            facts = {
                "start": start,
                "first_id": int(ids[0]),
                "crc32": {name: zlib.crc32(np.ascontiguousarray(values).data) for name, (values, _) in columns.items()},
            }
            counts = [np.diff(columns[member.column][1]).astype(np.uint32) for member in members]
            batch = pa.record_batch([pa.array(one) for one in counts], schema=schema)
            index.write_batch(batch, {"facts": json.dumps(facts, sort_keys=True)})
            piece = tar.encode(ids, columns, members).data
            start += len(piece)
            yield piece
    content = out.getvalue()
    yield memoryview(tar.END)
    yield memoryview(content)
    yield memoryview(_FOOTER.pack(zlib.crc32(content), len(content), _MAGIC))


class TarShard:
    """An open shard, read as `pyarrow.parquet.ParquetFile` is. Its methods raise ValueError over damaged bytes."""

    def __init__(self, file: pa.NativeFile, length: int) -> None:
        self._file = file
        content = self._read_index(length)
        self._index = pa.ipc.open_file(pa.BufferReader(content))
        metadata = self._index.schema.metadata or {}
        if b"schema" not in metadata:
            raise ValueError("its index names no columns")
        self.schema_arrow = pa.ipc.read_schema(pa.BufferReader(metadata[b"schema"]))
        self._members = tar.members_of(self.schema_arrow)

    @property
    def num_row_groups(self) -> int:
        return int(self._index.num_record_batches)

    def read_row_group(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Row group `group` with those of `columns` that there are, in the order of the schema."""
        batch, metadata = self._index.get_batch_with_custom_metadata(group)
        facts = json.loads(metadata[b"facts"])
        counts = {member.column: batch.column(member.column).to_numpy() for member in self._members}
        layout = tar.Layout.of(self._members, counts)
        numbers = {member.column: number for number, member in enumerate(self._members)}
        names = [name for name in self.schema_arrow.names if columns is None or name in columns]
        data = None
        arrays = []
        for name in names:
            if name == "query_id":
                arrays.append(pa.array(np.arange(facts["first_id"], facts["first_id"] + batch.num_rows)))
                continue
            if data is None:
                data = np.frombuffer(self._read(facts["start"], layout.blocks * tar.BLOCK), np.uint8)
            member = self._members[numbers[name]]
            offsets = np.concatenate([[0], np.cumsum(counts[name], dtype=np.int64)])
            values = tar.gather(data, layout, numbers[name], member, offsets)
            if zlib.crc32(values.data) != facts["crc32"][name]:
                raise ValueError(f"the values of {name} do not match their CRC-32")
            arrays.append(_array(values, offsets, self.schema_arrow.field(name).type))
        return pa.Table.from_arrays(arrays, schema=pa.schema([self.schema_arrow.field(name) for name in names]))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "TarShard":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_index(self, length: int) -> pa.Buffer:
        tail = self._read(max(0, length - _TAIL), min(length, _TAIL))
        if len(tail) < _FOOTER.size:
            raise ValueError("too short for a tar with an index")
        checksum, size, magic = _FOOTER.unpack(tail[-_FOOTER.size :])
        if magic != _MAGIC or size > length - _FOOTER.size:
            raise ValueError("no index behind the archive")
        start = length - _FOOTER.size - size
        held = len(tail) - _FOOTER.size - size
        content = tail.slice(held, size) if held >= 0 else self._read(start, size)
        if zlib.crc32(content) != checksum:
            raise ValueError("its index does not match its CRC-32")
        return content

    def _read(self, start: int, size: int) -> pa.Buffer:
        self._file.seek(start)
        data = self._file.read_buffer(size)
        if len(data) != size:
            raise ValueError(f"{len(data)} bytes at {start}, expected {size}")
        return data


def open_shard(url: str, shard: Shard) -> TarShard:
    """Open one shard for reading row groups. Raises TableError when it is gone, cut short, or without its index."""
    place = find_shard(url, shard)
    with naming_damage(place):
        if storage.is_local(place):
            return TarShard(pa.memory_map(storage.filesystem(place)[1]), shard.bytes)
        return TarShard(pa.PythonFile(storage.RangeReader(place, shard.bytes), "r"), shard.bytes)


def _columns(rows: pa.Table, members: list[tar.Member]) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Ids [B], and each member's values [V] and offsets [B + 1]."""
    return rows.column("query_id").to_numpy(), {member.column: _ragged(rows, member.column) for member in members}


def _ragged(rows: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    if pa.types.is_string(rows.schema.field(name).type):
        rows = pa.table({name: _as_bytes(rows.column(name))})
    return list_column(rows, name)


def _as_bytes(column: pa.ChunkedArray) -> pa.ListArray:
    """Strings as lists of their UTF-8 bytes."""
    strings = pa.concat_arrays(column.chunks)
    _, offsets, data = strings.buffers()
    numbers = pa.Array.from_buffers(pa.int32(), len(strings) + 1, [None, offsets], offset=strings.offset)
    values = pa.Array.from_buffers(pa.uint8(), len(data or b""), [None, data])
    return pa.ListArray.from_arrays(numbers, values)


def _array(values: np.ndarray, offsets: np.ndarray, type: pa.DataType) -> pa.Array:
    numbers = pa.array(offsets.astype(np.int32))
    if pa.types.is_string(type):
        return pa.StringArray.from_buffers(len(offsets) - 1, numbers.buffers()[1], pa.py_buffer(values))
    return pa.ListArray.from_arrays(numbers, pa.array(values, type.value_type), type=type)
