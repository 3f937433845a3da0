"""Normalised rows of a raw block on their way to staging, where the second pipeline reads them."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.sharding.hashing import combine, hash_strings
from schemas.shard_files import parquet

# Rows are kept in two messages, so that a sample of much data is drawn from the first alone.
SAMPLED_SHARE = 1 / 16
_FEATURES = ("feature_ids", "feature_values")


def with_hashes(batch: pa.RecordBatch, seed: int) -> pa.RecordBatch:
    """Add `hash` (of the key: it chooses the shard) and `content` (hash of text and features), both uint64."""
    content = hash_strings(batch["text"], seed)
    for name in _FEATURES:
        if name in batch.schema.names:
            content = combine(content, hash_strings(batch[name], seed))
    batch = batch.append_column("hash", pa.array(hash_strings(batch["key"], seed)))
    return batch.append_column("content", pa.array(content))


def split_mentions(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
    """Return points with `label_index` for `label_keys`: positions in the second batch, whose column is key.

    Points that name no keys are returned as they are, with None.
    """
    if "label_keys" not in batch.schema.names:
        return batch, None
    column = batch["label_keys"]
    named = column.flatten().dictionary_encode()
    offsets = column.offsets.to_numpy().astype(np.int64)
    index = parquet.list_array(named.indices.to_numpy(zero_copy_only=False), offsets - offsets[0], pa.int32())
    mentions = pa.record_batch({"key": named.dictionary})
    number = batch.schema.get_field_index("label_keys")
    return batch.set_column(number, "label_index", index), mentions


def sample_position(hashes: np.ndarray) -> np.ndarray:
    """Return the place [B] of each hash in [0, 1) for sampling: independent of its shard and of a validation split."""
    return (combine(hashes, hashes) >> np.uint64(11)).astype(np.float64) / 2**53


def split_sample(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield ("sampled", rows) and ("rest", rows) of points or labels."""
    sampled = pa.array(sample_position(batch["hash"].to_numpy()) < SAMPLED_SHARE)
    yield "sampled", batch.filter(sampled)
    yield "rest", batch.filter(pc.invert(sampled))
