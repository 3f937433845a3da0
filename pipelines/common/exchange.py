"""Exchange of bulk data between two stages, so that a runner groups small references, not rows.

The runner of this machine keeps everything it groups in the launching process, and on Flink and Spark a group is one
element in memory. There a worker writes its messages for all destinations as one file in staging, and sends the place
of each message. Dataflow, which has its own shuffle service, gets the messages themselves. A message is an Arrow IPC
stream of one record batch; its CRC-32 goes with its place, so that nothing else is ever decoded. On every runner, data
for the next flow is in files, and so are its places.
"""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa

from pipelines.common.flow import group_by_key
from schemas import storage
from schemas.checksums import crc32
from schemas.errors import StorageError
from schemas.sizes import in_pieces
from schemas.storage import join

_OPTIONS = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
_HELD_BYTES = 32 << 20
_PLACES = pa.schema([("url", pa.string()), ("start", pa.int64()), ("size", pa.int64()), ("checksum", pa.uint32())])

# A message, or its place: (URL, offset, bytes, CRC-32).
Packet = bytes | tuple[str, int, int, int]
K = TypeVar("K")


def size_of(packet: Packet) -> int:
    """Return the bytes of a packet."""
    return len(packet) if isinstance(packet, bytes) else packet[2]


@dataclass(frozen=True)
class Files:
    """Exchange through files under a prefix that every worker reaches. A retried bundle writes another file."""

    prefix: str

    def send(self, parts: Iterable[tuple[K, pa.RecordBatch]]) -> Iterator[tuple[K, Packet]]:
        """Turn (destination, batch) into (destination, packet), which `receive` opens anywhere. Raises StorageError."""
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


@dataclass(frozen=True)
class Shuffle:
    """Exchange through the runner's own shuffle."""

    def send(self, parts: Iterable[tuple[K, pa.RecordBatch]]) -> Iterator[tuple[K, Packet]]:
        for destination, batch in parts:
            out = pa.BufferOutputStream()
            _write(out, batch)
            yield destination, out.getvalue().to_pybytes()


Exchange = Files | Shuffle  # of record batches between workers


def send_together(exchange: Exchange, parts: Iterable[tuple[K, pa.RecordBatch]]) -> Iterator[tuple[K, Packet]]:
    """Send (destination, batch) held back until there are enough: few long messages, not many short ones.

    Raises StorageError.
    """
    for held in in_pieces(parts, lambda part: part[1].nbytes, _HELD_BYTES):
        yield from exchange.send((destination, pa.concat_batches(some)) for destination, some in group_by_key(held))
        del held  # before there are more


def choose_exchange(shuffles: bool, prefix: str, name: Literal["files", "shuffle"] | None = None) -> Exchange:
    """Return the exchange called `name`, or the default for a runner that `shuffles`, or does not."""
    return Shuffle() if (name == "shuffle" if name else shuffles) else Files(prefix)


def split_by(batch: pa.RecordBatch, part: np.ndarray) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (part, its rows in order) for each value of `part` [B] in ascending order."""
    if not len(part):
        return
    order = np.argsort(part, kind="stable")
    values, starts = np.unique(part[order], return_index=True)
    batch = batch.take(pa.array(order))
    for value, start, stop in zip(values.tolist(), starts.tolist(), [*starts[1:].tolist(), len(part)], strict=True):
        yield value, batch.slice(start, stop - start)


def receive(packets: Iterable[Packet], fields: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the batches of `packets`, in order; or of each only the columns with the numbers `fields`.

    Raises StorageError: gone, or damaged for good.
    """
    options = pa.ipc.IpcReadOptions(included_fields=fields)
    for packet in packets:
        content = pa.py_buffer(packet if isinstance(packet, bytes) else _read(*packet))
        with pa.ipc.open_stream(content, options=options) as stream:
            yield stream.read_next_batch()


def gather(packets: Iterable[Packet], schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of all packets in order of arrival; none if there are no packets.

    columns: columns of `schema` to decode; None: all.
    """
    fields = None if columns is None else sorted(schema.get_field_index(name) for name in columns)
    if fields is not None:
        schema = pa.schema([schema.field(number) for number in fields])
    return pa.Table.from_batches(receive(packets, fields), schema)


def places_of(packets: Iterable[Packet]) -> pa.RecordBatch:
    """Return the places of packets in files as rows, in a fixed order."""
    places = sorted(packet for packet in packets if not isinstance(packet, bytes))
    return pa.RecordBatch.from_pylist([dict(zip(_PLACES.names, place, strict=True)) for place in places], _PLACES)


def read_places(packet: Packet | None) -> list[Packet]:
    """Return the packets at the places in `packet`; none without it. Raises StorageError."""
    batches = receive([] if packet is None else [packet])
    return [tuple(place.values()) for batch in batches for place in batch.to_pylist()]


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """Return all rows of a table as one batch, to be sent."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


def _read(url: str, start: int, size: int, checksum: int) -> bytes:
    try:
        return storage.read_range(url, start, start + size, checksum=checksum)
    except FileNotFoundError:
        raise StorageError(
            f"{url}: these temporary files are missing; perhaps another command removed them. Run the same command "
            "again."
        ) from None


def _write(out: pa.BufferOutputStream, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(out, batch.schema, options=_OPTIONS) as stream:
        stream.write_batch(batch)
