"""Label keys to ids by a join: each block's keys meet the labels in the shard that their hash names.

No process holds all labels: a shard of labels is looked up with the keys that were sent to it, and the ids go back to
the block. A label's id is its rank in its shard after the labels of all shards before.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.pvalue import AsDict, PCollection

from pipelines.common import assign
from pipelines.common.exchange import Exchange, Packet, receive
from pipelines.sharding.blocks import Block
from pipelines.sharding.labels import OrderedLabels
from pipelines.sharding.steps import first_ids

_LOOKED_UP = 1 << 20  # keys at a time: Arrow builds its hash table of the shard's keys anew for each call


class ResolveLabels(beam.PTransform):
    """(block number, Block) to (block number, packet of `index` and `label_id`) of the keys that are known."""

    def __init__(self, ordered: OrderedLabels, shards: int, exchange: Exchange) -> None:
        super().__init__()
        self._ordered, self._shards, self._exchange = ordered, shards, exchange

    def expand(self, blocks: PCollection) -> PCollection:
        mentions = blocks | "Route" >> beam.ParDo(RouteMentions(self._shards, self._exchange))
        return (
            {"mentions": mentions, "keys": self._ordered.keys}
            | "By label shard" >> beam.CoGroupByKey()
            | "Look up" >> beam.ParDo(LookUp(self._shards, self._exchange), sizes=AsDict(self._ordered.sizes))
        )


class RouteMentions(beam.DoFn):
    """(block number, Block) to (label shard, (block number, packet))."""

    def __init__(self, shards: int, exchange: Exchange) -> None:
        self._shards, self._exchange = shards, exchange

    def process(self, element: tuple[int, Block]) -> Iterator[tuple[int, tuple[int, Packet]]]:
        number, block = element
        if block.mentions is None:
            return
        (named,) = receive([block.mentions])
        batch = pa.record_batch({"index": pa.array(np.arange(named.num_rows, dtype=np.int32)), "key": named["key"]})
        shard = (named["hash"].to_numpy() % np.uint64(self._shards)).astype(np.int64)
        for to, packet in self._exchange.send(assign.split_by(batch, shard)):
            yield to, (number, packet)


class LookUp(beam.DoFn):
    """(label shard, its keys and what blocks name there) to (block number, packet)."""

    def __init__(self, shards: int, exchange: Exchange) -> None:
        self._shards, self._exchange = shards, exchange

    def process(self, element: tuple[int, dict[str, Any]], sizes: dict[int, int]) -> Iterator[tuple[int, Packet]]:
        shard, parts = element
        (labels,) = receive(parts["keys"])
        first = int(first_ids(sizes, self._shards)[shard])
        for some in _chunks(parts["mentions"]):
            yield from self._exchange.send(look_up(labels["key"], first, some))


def look_up(
    labels: pa.Array, first: int, mentions: list[tuple[int, pa.RecordBatch]]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(block number, `index` and `label_id` of the known keys) for each (block number, `index` and `key`).

    labels: the keys of a shard in the order of their ids, the first of which is `first`.
    """
    keys = pa.concat_arrays([batch["key"] for _, batch in mentions])
    rank = pc.index_in(keys, value_set=labels)
    start = 0
    for number, batch in mentions:
        found = rank.slice(start, batch.num_rows)
        start += batch.num_rows
        known = pa.record_batch({"index": batch["index"], "label_id": pc.add(found.cast(pa.int64()), first)})
        yield number, known.filter(pc.is_valid(found))


def known_ids(mentions: int, found: Iterable[pa.RecordBatch]) -> np.ndarray:
    """The id of each of a block's mentions, -1 where the label is not there: int64 [mentions]."""
    ids = np.full(mentions, -1, np.int64)
    for batch in found:
        ids[batch["index"].to_numpy()] = batch["label_id"].to_numpy()
    return ids


def _chunks(mentions: Iterable[tuple[int, Packet]]) -> Iterator[list[tuple[int, pa.RecordBatch]]]:
    some: list[tuple[int, pa.RecordBatch]] = []
    rows = 0
    for number, packet in mentions:
        (batch,) = receive([packet])
        some.append((number, batch))
        rows += batch.num_rows
        if rows >= _LOOKED_UP:
            yield some
            some, rows = [], 0
    if some:
        yield some
