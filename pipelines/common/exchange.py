"""Exchange of bulk data between two stages, so that a runner groups small references instead of rows.

The local runner keeps all groups in the launching process. On Flink and Spark, each group is held in memory as one
element. A worker therefore writes its messages for all destinations to one file in staging, and sends only the location
of each message. A message is an Arrow IPC stream with one record batch. The CRC-32 of a message is sent with its
location, so that a reader can verify the message. Data for the next flow and its locations are stored in files too.
"""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa

from pipelines.common.flow import group_by_key
from schemas import storage
from schemas.checksums import crc32
from schemas.errors import StorageError
from schemas.sizes import batch_by_size
from schemas.storage import join

_OPTIONS = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
_HELD_BYTES = 32 << 20
_LOCATIONS = pa.schema([("url", pa.string()), ("start", pa.int64()), ("size", pa.int64()), ("checksum", pa.uint32())])

Packet = tuple[str, int, int, int]  # place of a message: (URL, offset, bytes, CRC-32)
K = TypeVar("K")


@dataclass(frozen=True)
class FileExchange:
    """Exchange through files under a prefix that every worker can read. A retried bundle writes a new file."""

    prefix: str

    def send(self, parts: Iterable[tuple[K, pa.RecordBatch]]) -> Iterator[tuple[K, Packet]]:
        """Convert (destination, batch) to (destination, packet) that any worker can `receive`. Raises StorageError."""
        out = pa.BufferOutputStream()
        places: list[tuple[K, int, int]] = []
        for destination, batch in parts:
            start = out.tell()
            _write(out, batch)
            places.append((destination, start, out.tell() - start))
        if not places:
            return
        url = join(self.prefix, f"{uuid.uuid4().hex}.arrow")
        content = memoryview(out.getvalue())
        storage.write_bytes(url, content, durable=False)
        for destination, start, size in places:
            yield destination, (url, start, size, crc32(content[start : start + size]))


def send_together(exchange: FileExchange, parts: Iterable[tuple[K, pa.RecordBatch]]) -> Iterator[tuple[K, Packet]]:
    """Buffer pairs (destination, batch) and send a few long messages instead of many short messages.

    Raises StorageError.
    """
    for held in batch_by_size(parts, lambda part: part[1].nbytes, _HELD_BYTES):
        yield from exchange.send((destination, pa.concat_batches(some)) for destination, some in group_by_key(held))
        del held  # frees memory before the next batches arrive


def split_by(batch: pa.RecordBatch, part: np.ndarray) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (part, rows of this part in order) for each value of `part` [B] in ascending order."""
    if not len(part):
        return
    order = np.argsort(part, kind="stable")
    values, starts = np.unique(part[order], return_index=True)
    batch = batch.take(pa.array(order))
    for value, start, stop in zip(values.tolist(), starts.tolist(), [*starts[1:].tolist(), len(part)], strict=True):
        yield value, batch.slice(start, stop - start)


def receive(packets: Iterable[Packet], fields: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the batches of `packets` in order; if `fields` is given, read only the columns with these numbers.

    Raises StorageError if a file is missing or permanently damaged.
    """
    options = pa.ipc.IpcReadOptions(included_fields=fields)
    for packet in packets:
        with pa.ipc.open_stream(pa.py_buffer(_read(*packet)), options=options) as stream:
            yield stream.read_next_batch()


def gather(packets: Iterable[Packet], schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of all packets in order of arrival; an empty table if there are no packets.

    columns: names of the columns of `schema` to decode; None: all columns.
    """
    fields = None if columns is None else sorted(schema.get_field_index(name) for name in columns)
    if fields is not None:
        schema = pa.schema([schema.field(number) for number in fields])
    return pa.Table.from_batches(receive(packets, fields), schema)


def pack_locations(packets: Iterable[Packet]) -> pa.RecordBatch:
    """Return the file locations of the packets as rows, in sorted order."""
    rows = [dict(zip(_LOCATIONS.names, place, strict=True)) for place in sorted(packets)]
    return pa.RecordBatch.from_pylist(rows, _LOCATIONS)


def read_locations(packet: Packet | None) -> list[Packet]:
    """Return the packet locations stored in `packet`; an empty list if `packet` is None. Raises StorageError."""
    batches = receive([] if packet is None else [packet])
    return [tuple(place.values()) for batch in batches for place in batch.to_pylist()]


def to_record_batch(table: pa.Table) -> pa.RecordBatch:
    """Return all rows of a table as one batch, which can be sent."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


def _read(url: str, start: int, size: int, checksum: int) -> bytes:
    try:
        return storage.read_range(url, start, start + size, checksum=checksum)
    except FileNotFoundError:
        raise StorageError(
            f"{url}: this temporary file is missing; perhaps another command removed the file. Run the same "
            "command again."
        ) from None


def _write(out: pa.BufferOutputStream, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(out, batch.schema, options=_OPTIONS) as stream:
        stream.write_batch(batch)
