"""Label keys to ids by a join: each block's keys meet the labels in the shard that their hash names.

No process holds all labels: a shard of labels is looked up with the keys that were sent to it, and the ids go back to
the block. A label's id is its rank in its shard after the labels of all shards before. Blocks go in groups, so that
there are not more references than _REFERENCES each way, however many blocks and shards there are. A shard is
looked up in several places, each for other groups, where there are few shards.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.pvalue import AsDict, PCollection

from pipelines.common import assign
from pipelines.common.exchange import Exchange, Files, Packet, receive
from pipelines.common.summary import Block
from pipelines.sharding.hashing import hash_strings
from pipelines.sharding.labels import OrderedLabels
from pipelines.sharding.plan import LabelsPlan
from pipelines.sharding.steps import first_ids

_REFERENCES = 1 << 17  # which some runners keep in the launching process
_LOOKED_UP = 1 << 20  # keys at a time: Arrow builds its hash table of the shard's keys anew for each call
_PLACES = 16  # where keys are looked up, or more
SEND, FIND = "send keys of labels", "find labels"  # steps; their rows are keys

Blocks = tuple[Block, ...]


def ids_of_table(table: str) -> str:
    """Name the collection of the label ids by group of the blocks of an input table."""
    return f"ids of {table}"


def group_blocks(blocks: Sequence[Block], shards: int) -> list[tuple[int, Blocks]]:
    """Put blocks that meet `shards` of labels into groups: (number, blocks)."""
    size = max(1, -(-len(blocks) * shards // _REFERENCES))
    return [(start // size, tuple(blocks[start : start + size])) for start in range(0, len(blocks), size)]


def places_of_shard(shards: int) -> int:
    """Return the number of places where a shard of labels is looked up: place p is of shard p // places."""
    return -(-_PLACES // shards)


@beam.ptransform_fn
def resolve_labels(
    blocks: PCollection, ordered: OrderedLabels, plan: LabelsPlan, seed: int, exchange: Exchange, ids: Files
) -> PCollection:
    """Join (group number, blocks) with the labels: (group number, packet in `ids` of `index` and `label_id`).

    seed: of the hash that chooses a label's shard.
    """
    mentions = blocks | "Route" >> beam.FlatMap(route_mentions, plan, seed, exchange)
    keys = ordered.keys | "To places" >> beam.FlatMap(copy_keys, plan.shards)
    return (
        {"mentions": mentions, "keys": keys}
        | "By place" >> beam.CoGroupByKey()
        | "Look up" >> beam.FlatMap(resolve_shard, plan, ids, AsDict(ordered.sizes))
    )


def copy_keys(element: tuple[int, Packet], shards: int) -> Iterator[tuple[int, Packet]]:
    """Send (label shard, packet of its keys) to all its places."""
    shard, packet = element
    places = places_of_shard(shards)
    yield from ((shard * places + place, packet) for place in range(places))


def route_mentions(
    element: tuple[int, Blocks], plan: LabelsPlan, seed: int, exchange: Exchange
) -> Iterator[tuple[int, tuple[int, Packet]]]:
    """Send the label keys that (group number, blocks) name: (place, (group number, packet))."""
    number, blocks = element
    plan.meter.start(SEND)
    mentions = [batch for batch in map(read_mentions, blocks) if batch is not None]
    if not mentions:
        return
    named = pa.concat_batches(mentions)
    batch = pa.record_batch({"index": pa.array(np.arange(named.num_rows)), "key": named["key"]})
    shard = (hash_strings(named["key"], seed) % np.uint64(plan.shards)).astype(np.int64)
    places = places_of_shard(plan.shards)
    for label_shard, packet in plan.meter.count_bytes(SEND, exchange.send(assign.split_by(batch, shard))):
        yield label_shard * places + number % places, (number, packet)
    plan.meter.count(SEND, named.num_rows)


def read_mentions(block: Block) -> pa.RecordBatch | None:
    """Read the label keys that a block names; None where its points name none by keys."""
    return None if block.mentions is None else next(receive([block.mentions]))


def resolve_shard(
    element: tuple[int, dict[str, Any]], plan: LabelsPlan, files: Files, sizes: dict[int, int]
) -> Iterator[tuple[int, Packet]]:
    """Look up what blocks name in (place, parts), and send the ids back: (group number, packet)."""
    place, parts = element
    plan.meter.start(FIND)
    (labels,) = receive(parts["keys"])
    first = int(first_ids(sizes)[plan.shards_before + place // places_of_shard(plan.shards)])
    ids = ids_of(labels, first)
    for mentions in _chunks(parts["mentions"]):
        yield from plan.meter.count_bytes(FIND, files.send(look_up(labels["key"], ids, mentions)))
        plan.meter.count(FIND, sum(batch.num_rows for _, batch in mentions))


def ids_of(labels: pa.RecordBatch, first: int) -> pa.Array:
    """Return the ids of a shard's labels: those in `label_id`, and from `first` on, in order, where there is none."""
    if "label_id" not in labels.schema.names:
        return pa.array(np.arange(first, first + labels.num_rows))
    new = pc.is_null(labels["label_id"]).to_numpy(zero_copy_only=False)
    ids = labels["label_id"].fill_null(0).to_numpy(zero_copy_only=False).copy()
    ids[new] = first + np.arange(np.count_nonzero(new))
    return pa.array(ids)


def look_up(
    labels: pa.Array, ids: pa.Array, mentions: list[tuple[int, pa.RecordBatch]]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (group number, `index` and `label_id` of the labels that exist) for each (group number, `index`, `key`).

    labels, ids: the keys of a shard, and their ids.
    """
    keys = pa.concat_arrays([batch["key"] for _, batch in mentions])
    rank = pc.index_in(keys, value_set=labels)
    start = 0
    for number, batch in mentions:
        ranks = rank.slice(start, batch.num_rows)
        start += batch.num_rows
        resolved = pa.record_batch({"index": batch["index"], "label_id": ids.take(ranks)})
        yield number, resolved.filter(pc.is_valid(ranks))


def known_ids(mentions: int, batches: Iterable[pa.RecordBatch]) -> np.ndarray:
    """Return the id of each of a group's mentions, -1 where there is no such label: int64 [mentions]."""
    ids = np.full(mentions, -1, np.int64)
    for batch in batches:
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
