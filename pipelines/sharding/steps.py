"""What several stages do alike: spread rows over shards, gather them, say where a shard's ids start."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa

from pipelines.common import assign
from pipelines.common.exchange import Exchange, Packet, receive
from pipelines.formats.rejects import Reject, Rejects, to_batch
from pipelines.sharding.summary import Summary

ROWS, SIZES = "rows", "sizes"


def send_to_shards(exchange: Exchange, batch: pa.RecordBatch, shards: int) -> Iterator[tuple[int, Packet]]:
    """(shard, packet) of rows with `hash`."""
    shard = (batch["hash"].to_numpy() % np.uint64(shards)).astype(np.int64)
    yield from exchange.send(assign.split_by(batch, shard))


def gather(packets: Iterable[Packet], schema: pa.Schema) -> pa.Table:
    """The rows of all packets in the order of their arrival; none where there are no packets."""
    return pa.Table.from_batches(receive(packets), schema)


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """All rows as one batch."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


def first_ids(sizes: Mapping[int, int], shards: int) -> np.ndarray:
    """Ids [first[s], first[s + 1]) are those of shard s, given the rows of each: int64 [shards + 1]."""
    return np.concatenate([[0], np.cumsum([sizes[shard] for shard in range(shards)], dtype=np.int64)])


def reported(table: str, rejects: list[Reject], exchange: Exchange, **fields: Any) -> Summary:
    """A Summary with `rejects` of the input table, which are left in staging through `exchange`."""
    packets = exchange.send([(table, to_batch(rejects))]) if rejects else ()
    return Summary(rejects=Rejects.of(table, rejects), rejected=tuple(packets), **fields)


class EveryShard(beam.DoFn):
    """Shard number to (shard, nothing): a shard that no row falls into is written too."""

    def process(self, element: int) -> Iterator[tuple[int, None]]:
        yield element, None
