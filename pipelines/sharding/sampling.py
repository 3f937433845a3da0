"""Bounded sample of the texts for training a tokenizer: the same texts whatever the order of files and lines."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from pipelines.common.exchange import receive
from pipelines.common.summary import Block
from pipelines.sharding.blocks import SAMPLED_SHARE, sample_position

_THREADS = 8  # readers wait for storage more than they work


def sample_texts(blocks: Sequence[Block], rows: int, size: int) -> pa.ChunkedArray:
    """Draw about `size` texts of the `rows` rows in `blocks` (all of fewer), chosen by the keys' hashes.

    Raises StorageError.
    """
    share = size / rows if rows > size else 1.0

    def texts_of(block: Block) -> list[pa.Array]:
        packets = [block.sampled] if share <= SAMPLED_SHARE else [block.sampled, block.rest]
        return [_take(batch, share) for batch in receive(packets)]

    with ThreadPoolExecutor(_THREADS) as pool:
        chunks = [chunk for some in pool.map(texts_of, blocks) for chunk in some]
    return pa.chunked_array(chunks, pa.string())


def _take(batch: pa.RecordBatch, share: float) -> pa.Array:
    if share >= 1:
        return batch["text"]
    return batch["text"].filter(pa.array(sample_position(np.asarray(batch["hash"])) < share))
