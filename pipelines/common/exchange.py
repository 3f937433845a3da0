"""Exchange of bulk data between two stages, so that a runner groups small references, not rows.

Beam's in-process runner keeps everything it groups in the launching process, and on Flink and Spark a group is one
element in memory. There a worker writes what it has for all destinations as one file in staging, and sends where each
destination's message lies. Dataflow, with a shuffle service of its own, gets the messages themselves. A message is an
Arrow IPC stream of one record batch; its CRC-32 goes with its place, so that nothing else is ever decoded.
"""

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import pyarrow as pa
from apache_beam.runners.runner import PipelineRunner

from schemas import storage
from schemas.checksums import crc32
from schemas.errors import StorageError
from schemas.storage import join

_SHUFFLING = ("DataflowRunner",)
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")

# A message, or its place: (URL, offset, bytes, CRC-32).
Packet = bytes | tuple[str, int, int, int]
K = TypeVar("K")


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


def choose(runner: PipelineRunner | None, prefix: str, name: Literal["files", "shuffle"] | None = None) -> Exchange:
    """Return the exchange called `name`, or else the one that suits `runner`."""
    shuffles = name == "shuffle" if name else type(runner).__name__ in _SHUFFLING
    return Shuffle() if shuffles else Files(prefix)


def receive(packets: Iterable[Packet]) -> Iterator[pa.RecordBatch]:
    """Yield the batches behind `packets`, one each, in their order. Raises StorageError: gone, or damaged for good."""
    for packet in packets:
        with pa.ipc.open_stream(pa.py_buffer(packet if isinstance(packet, bytes) else _read(*packet))) as stream:
            yield stream.read_next_batch()


def gather(packets: Iterable[Packet], schema: pa.Schema) -> pa.Table:
    """Return the rows of all packets in the order of their arrival; none where there are no packets."""
    return pa.Table.from_batches(receive(packets), schema)


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """Return all rows of a table as one batch, to be sent."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


def _read(url: str, start: int, size: int, checksum: int) -> bytes:
    try:
        return storage.read_range(url, start, start + size, checksum=checksum)
    except FileNotFoundError:
        raise StorageError(
            f"{url}: this staged data is gone, as if another command had cleared it. Run the same command again."
        ) from None


def _write(out: pa.BufferOutputStream, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(out, batch.schema, options=_OPTIONS) as stream:
        stream.write_batch(batch)
