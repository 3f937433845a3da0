"""Candidates of one block for one shard, in storage until the merge: written and read in chunks of one query batch.

A file is its chunks laid end to end; a chunk of n rows is n · F keys, then n float32: the lowest score among the row's
positives in this block, infinity without any. Little-endian, as every machine that Faiss runs on.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from schemas import storage
from schemas.checksums import crc32
from schemas.errors import StorageError


@dataclass(frozen=True)
class Chunks:
    """Rows of a file, and the CRC-32 of each chunk."""

    rows: int
    checksums: tuple[int, ...]


def write_chunks(url: str, chunks: Iterable[tuple[np.ndarray, np.ndarray]]) -> Chunks:
    """Write chunks (keys uint64 [n, F], weakest float32 [n]) to `url`, whole or not at all. Raises StorageError."""
    rows, checksums = 0, []
    with storage.writing(url, durable=False) as path, open(path, "wb") as file:
        for chunk in chunks:
            checksum = 0
            for part in chunk:
                data = np.ascontiguousarray(part).data.cast("B")
                file.write(data)
                checksum = crc32(data, checksum)
            rows += len(chunk[0])
            checksums.append(checksum)
    return Chunks(rows, tuple(checksums))


def read_chunk(url: str, chunks: Chunks, number: int, batch: int, fetch: int) -> tuple[np.ndarray, np.ndarray]:
    """Read chunk `number` of a file with `batch` rows a chunk: keys uint64 [n, fetch], weakest float32 [n].

    Damaged bytes are read again. Raises StorageError: gone, or damaged for good.
    """
    row_bytes = 8 * fetch + 4
    first = number * batch
    rows = min(batch, chunks.rows - first)
    try:
        bounds = first * row_bytes, (first + rows) * row_bytes
        data = storage.read_range(url, *bounds, checksum=chunks.checksums[number])
    except FileNotFoundError:
        raise StorageError(f"{url}: these candidates are gone. Run the same command again.") from None
    keys = np.frombuffer(data, np.uint64, rows * fetch).reshape(rows, fetch)
    return keys, np.frombuffer(data, np.float32, rows, 8 * rows * fetch)
