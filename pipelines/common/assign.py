"""Assignment of rows to shards: a salted hash of the key alone decides, so neither runner nor arrival can change it."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

MIN_SHARDS = 4


def in_share(hashes: np.ndarray, share: tuple[float, float]) -> np.ndarray:
    """Tell which hashes [B] fall into [low, high) of their range, by the high bits: the low ones choose the shard."""
    position = (hashes >> np.uint64(32)).astype(np.float64) / 2**32
    return (position >= share[0]) & (position < share[1])


def default_shards(rows: int, estimated_bytes: float, shard_bytes: int) -> int:
    """Choose how many shards of about `shard_bytes`: at least 4 of small data, so that it spreads over readers."""
    return max(min(MIN_SHARDS, rows), -(-int(estimated_bytes) // shard_bytes), 1)


def default_row_group_rows(rows: int) -> int:
    """Choose the rows of a row group: small data still has many to permute; large data reads longer ones at a time."""
    return 1024 if rows < 1_000_000 else 8192


def split_by(batch: pa.RecordBatch, part: np.ndarray) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (part, its rows in order) for each value of `part` [B] in ascending order."""
    if not len(part):
        return
    order = np.argsort(part, kind="stable")
    values, starts = np.unique(part[order], return_index=True)
    batch = batch.take(pa.array(order))
    for value, start, stop in zip(values.tolist(), starts.tolist(), [*starts[1:].tolist(), len(part)], strict=True):
        yield value, batch.slice(start, stop - start)
