"""Shards as uncompressed Arrow IPC files, mapped on a local disk and read whole from other storage."""

from collections.abc import Sequence

import pyarrow as pa

from schemas import storage
from schemas.layout import shard_name
from schemas.manifest import Shard
from schemas.shard_files import ranges

EXTENSION = "arrow"


class ArrowShard(ranges.OpenShard):
    def __init__(self, source: ranges.Source, shard: Shard, verify: bool) -> None:
        super().__init__(source)
        content = source.read(0, shard.bytes)
        if verify and storage.crc32(content) != storage.unpack(shard.checksums)[0]:
            raise ValueError("its bytes do not match their CRC-32")
        file = pa.ipc.open_file(pa.BufferReader(content))
        self._groups = [pa.Table.from_batches([file.get_batch(group)]) for group in range(file.num_record_batches)]
        self.schema_arrow, self.num_row_groups, self.memory = file.schema, len(self._groups), shard.bytes

    def read_row_group(self, group: int, columns: Sequence[str] | None = None, pieces: object = None) -> pa.Table:
        return self._groups[group].select([n for n in self.schema_arrow.names if columns is None or n in columns])


def write_shard(url: str, index: int, count: int, table: pa.Table, row_group_rows: int) -> Shard:
    with pa.ipc.new_file(out := pa.BufferOutputStream(), table.schema) as file:
        file.write_table(table.combine_chunks(), max_chunksize=row_group_rows)
    data = memoryview(out.getvalue())
    name, sums = shard_name(index, count, EXTENSION), storage.pack([storage.crc32(data)])
    storage.write_bytes(storage.join(url, name), data)
    return Shard(path=name, rows=table.num_rows, bytes=len(data), sha256=storage.sha256(data), checksums=sums)


def open_shard(url: str, shard: Shard, access: ranges.Access = ranges.VERIFIED) -> ArrowShard:
    with ranges.opening(url, shard, access) as source:
        return ArrowShard(source, shard, access.verify)
