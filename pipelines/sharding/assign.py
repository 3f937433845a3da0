"""Where a row goes: a salted hash of its key alone decides, so neither runner nor arrival can change it."""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

SHARD_ROWS = 1 << 18
MIN_SHARDS = 4
BLOCK_LINES = 4096


def hash_keys(keys: Sequence[str], seed: int) -> np.ndarray:
    """64-bit BLAKE2b of each key [B], salted with `seed` in [0, 2^64): uint64 [B]."""
    salt = seed.to_bytes(8, "little")
    digests = b"".join(hashlib.blake2b(key.encode(), digest_size=8, salt=salt).digest() for key in keys)
    return np.frombuffer(digests, "<u8")


def in_share(hashes: np.ndarray, share: tuple[float, float]) -> np.ndarray:
    """Whether each hash [B] falls into [low, high) of their range, by its high bits: the low ones choose the shard."""
    position = (hashes >> np.uint64(32)).astype(np.float64) / 2**32
    return (position >= share[0]) & (position < share[1])


def default_shards(rows: int) -> int:
    """Shards of about 2^18 rows, and at least 4, so that small data spreads over a few readers too."""
    return max(MIN_SHARDS, -(-rows // SHARD_ROWS))


def default_row_group_rows(rows: int) -> int:
    """Small data still has many row groups to permute; large data reads longer ones at a time."""
    return 1024 if rows < 1_000_000 else 8192


def block_lines(shards: int) -> int:
    """Lines read as one element: a block sends each shard dozens of rows at once, and fits into a worker's memory."""
    return min(max(BLOCK_LINES, 64 * shards), 16 * BLOCK_LINES)


def split_by(batch: pa.RecordBatch, part: np.ndarray) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(part, its rows in order) for each value of `part` [B] in ascending order."""
    if not len(part):
        return
    order = np.argsort(part, kind="stable")
    values, starts = np.unique(part[order], return_index=True)
    for value, rows in zip(values.tolist(), np.split(order, starts[1:]), strict=True):
        yield value, batch.take(pa.array(rows))
