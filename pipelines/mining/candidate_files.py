"""Candidates of one block for one shard, in storage until the merge: written and read in chunks of one query batch.

A file is its chunks laid end to end; a chunk of n rows is n · F keys, then n float32: the lowest score among the row's
positives in this block, infinity without any. Little-endian, as every machine that Faiss runs on.
"""

import zlib
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from schemas import storage
from schemas.errors import TableError


@dataclass(frozen=True)
class Chunks:
    """Rows of a file, and the CRC-32 of each chunk."""

    rows: int
    checksums: tuple[int, ...]


class ChunkWriter:
    """Writer of chunks to `url`, whole or not at all; a context manager. `chunks` is set when it has ended."""

    chunks: Chunks

    def __init__(self, url: str) -> None:
        self._writing = storage.writing(url, durable=False)
        self._rows = 0
        self._checksums: list[int] = []

    def __enter__(self) -> "ChunkWriter":
        self._file = open(self._writing.__enter__(), "wb")
        return self

    def write(self, keys: np.ndarray, weakest: np.ndarray) -> None:
        """Append keys uint64 [n, F] and weakest float32 [n]."""
        checksum = 0
        for part in (keys, weakest):
            data = np.ascontiguousarray(part).data.cast("B")
            self._file.write(data)
            checksum = zlib.crc32(data, checksum)
        self._rows += len(keys)
        self._checksums.append(checksum)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        self.chunks = Chunks(self._rows, tuple(self._checksums))
        self._writing.__exit__(kind, error, trace)


def read_chunk(url: str, chunks: Chunks, number: int, batch: int, fetch: int) -> tuple[np.ndarray, np.ndarray]:
    """Read chunk `number` of a file with `batch` rows a chunk: keys uint64 [n, fetch], weakest float32 [n].

    Raises TableError: gone or damaged.
    """
    row_bytes = 8 * fetch + 4
    first = number * batch
    rows = min(batch, chunks.rows - first)
    try:
        data = storage.read_range(url, first * row_bytes, (first + rows) * row_bytes)
    except FileNotFoundError:
        raise TableError(f"{url}: these candidates are gone. Run the same command again.") from None
    if len(data) != rows * row_bytes or zlib.crc32(data) != chunks.checksums[number]:
        raise TableError(f"{url}: the candidates of rows {first} to {first + rows} are damaged. Run the command again.")
    keys = np.frombuffer(data, np.uint64, rows * fetch).reshape(rows, fetch)
    return keys, np.frombuffer(data, np.float32, rows, 8 * rows * fetch)
