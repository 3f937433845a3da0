"""Bulk data on its way between two stages, so that what a runner groups are small references, not rows.

Beam's in-process runner keeps everything it groups in the launching process. There a worker writes what it has for all
destinations as one file in staging, and sends where each destination's message lies. Runners with a shuffle service of
their own get the messages themselves. A message is an Arrow IPC stream of one record batch.
"""

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pyarrow as pa
from apache_beam.runners.runner import PipelineRunner

from schemas import storage
from schemas.errors import InputError
from schemas.storage import join

FILES, SHUFFLE = "files", "shuffle"
_SHUFFLING = ("DataflowRunner", "FlinkRunner", "SparkRunner", "PortableRunner")
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")

# A message, or where it lies: (URL, offset, bytes).
Packet = bytes | tuple[str, int, int]
K = TypeVar("K")


class Exchange(Protocol):
    """How record batches travel; instances are picklable."""

    def send(self, parts: Iterable[tuple[K, pa.RecordBatch]]) -> Iterator[tuple[K, Packet]]:
        """(destination, batch) to (destination, packet), which `receive` opens anywhere. Raises StorageError."""
        ...


@dataclass(frozen=True)
class Files:
    """Through files under a prefix that every worker reaches. A retried bundle writes another file."""

    prefix: str

    def send(self, parts: Iterable[tuple[K, pa.RecordBatch]]) -> Iterator[tuple[K, Packet]]:
        out = pa.BufferOutputStream()
        places: list[tuple[K, int, int]] = []
        for destination, batch in parts:
            start = out.tell()
            _write(out, batch)
            places.append((destination, start, out.tell() - start))
        if not places:
            return
        url = join(self.prefix, f"{uuid.uuid4().hex}.arrow")
        storage.write_bytes(url, memoryview(out.getvalue()), durable=False)
        for destination, start, size in places:
            yield destination, (url, start, size)


@dataclass(frozen=True)
class Shuffle:
    """Through the runner's own shuffle."""

    def send(self, parts: Iterable[tuple[K, pa.RecordBatch]]) -> Iterator[tuple[K, Packet]]:
        for destination, batch in parts:
            out = pa.BufferOutputStream()
            _write(out, batch)
            yield destination, out.getvalue().to_pybytes()


def choose(runner: PipelineRunner | None, prefix: str, name: str | None = None) -> Exchange:
    """The exchange called `name` (FILES or SHUFFLE), or else the one that suits `runner`. Raises InputError."""
    if name not in (None, FILES, SHUFFLE):
        raise InputError(f"exchange is {FILES} or {SHUFFLE}; got {name!r}.")
    shuffles = name == SHUFFLE if name else type(runner).__name__ in _SHUFFLING
    return Shuffle() if shuffles else Files(prefix)


def receive(packets: Iterable[Packet]) -> Iterator[pa.RecordBatch]:
    """The batches behind `packets`, one each, in their order. Raises StorageError."""
    for packet in packets:
        data: Any = packet if isinstance(packet, bytes) else storage.read_range(packet[0], packet[1], sum(packet[1:]))
        with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
            yield stream.read_next_batch()


def _write(out: pa.BufferOutputStream, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(out, batch.schema, options=_OPTIONS) as stream:
        stream.write_batch(batch)
