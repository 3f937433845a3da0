"""Steps that several stages share: rows to their shards, the first ids of shards, reports of rejects."""

from collections.abc import Iterator, Mapping
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa

from pipelines.common import assign
from pipelines.common.exchange import Exchange, Packet
from pipelines.common.summary import Summary
from pipelines.formats.rejects import Reject, Rejects, to_batch

ROWS, SIZES = "rows", "sizes"


def send_to_shards(exchange: Exchange, batch: pa.RecordBatch, shards: int) -> Iterator[tuple[int, Packet]]:
    """Send rows with `hash` to their shards: (shard, packet)."""
    shard = (batch["hash"].to_numpy() % np.uint64(shards)).astype(np.int64)
    yield from exchange.send(assign.split_by(batch, shard))


def first_ids(sizes: Mapping[int, int]) -> np.ndarray:
    """Return first, int64 [shards + 1], from the rows of each shard: ids [first[s], first[s + 1]) are those of s."""
    return np.concatenate([[0], np.cumsum([sizes[shard] for shard in range(len(sizes))], dtype=np.int64)])


def reported(table: str, rejects: list[Reject], exchange: Exchange, **fields: Any) -> Summary:
    """Return a Summary with `rejects` of the input table, which are left in staging through `exchange`."""
    packets = exchange.send([(table, to_batch(rejects))]) if rejects else ()
    return Summary(rejects=Rejects.of(table, rejects), rejected=tuple(packets), **fields)


def every_shard(shards: int) -> beam.Create:
    """Create (shard, None) for every shard: one that no row falls into is written, too."""
    return beam.Create([(shard, None) for shard in range(shards)])
