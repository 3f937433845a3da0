"""Steps that queries and labels share: texts to tokens, rows to their shards, ids of shards, reports of rejects."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.pvalue import PCollection
from apache_beam.transforms.window import GlobalWindows

from pipelines.common import assign
from pipelines.common.exchange import Exchange, Files, Packet, SendBuffer, places_of, read_places
from pipelines.common.summary import Summary
from pipelines.formats.rejects import Reject, Rejects, to_batch
from pipelines.sharding import tokenizer
from pipelines.sharding.plan import TablePlan
from pipelines.sharding.words import Encoder
from schemas import storage
from schemas.shard_files import parquet

ROWS, SIZES = "rows", "sizes"


def open_tokens(plan: TablePlan) -> Encoder | None:
    """Open the tokenizer of `plan`, None where no row has a text. Raises StorageError."""
    if plan.vocabulary is None:
        return None
    opened = tokenizer.open_tokenizer(storage.read_sealed(plan.tokenizer), plan.tokenizer)
    return Encoder(opened, plan.tokenizer_name)


def encode(batch: pa.RecordBatch, plan: TablePlan, tokens: Encoder | None) -> pa.RecordBatch:
    """Return parsed rows with `input_ids` (unless they have features alone) and `truncated`."""
    rows = batch.num_rows
    if tokens is None:
        values, offsets, truncated = np.zeros(0, np.uint32), np.zeros(rows + 1, np.int64), np.zeros(rows, bool)
    else:
        values, offsets, truncated = tokens.encode(batch["text"])
    batch = batch.append_column("truncated", pa.array(truncated))
    if plan.tokens is not None:
        batch = batch.append_column("input_ids", parquet.list_array(values, offsets, plan.tokens))
    return batch


def by_shard(batch: pa.RecordBatch, shards: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (shard, its rows) of rows with `hash`."""
    yield from assign.split_by(batch, (batch["hash"].to_numpy() % np.uint64(shards)).astype(np.int64))


def send_to_shards(exchange: Exchange, batch: pa.RecordBatch, shards: int) -> Iterator[tuple[int, Packet]]:
    """Send rows with `hash` to their shards: (shard, packet)."""
    yield from exchange.send(by_shard(batch, shards))


@beam.ptransform_fn
def keep(packets: PCollection, name: str, files: Files) -> PCollection:
    """Keep (key, packet in files) for a later pipeline as the collection `name`; yields Summary."""
    return packets | "By key" >> beam.GroupByKey() | "Places" >> beam.ParDo(_Keep(name, files))


class _Keep(beam.DoFn):
    """Writes where the packets of (key, packets) lie, those of many keys in one file."""

    def __init__(self, name: str, files: Files) -> None:
        self._name, self._files = name, files

    def start_bundle(self) -> None:
        self._buffer: SendBuffer[int] = SendBuffer(self._files)

    def process(self, element: tuple[int, Iterable[Packet]]) -> Iterator[Summary]:
        yield from map(self._kept, self._buffer.add([(element[0], places_of(element[1]))]))

    def finish_bundle(self) -> Iterator[Any]:
        yield from map(GlobalWindows.windowed_value, map(self._kept, self._buffer.send()))

    def _kept(self, sent: tuple[int, Packet]) -> Summary:
        return Summary(kept={self._name: dict([sent])})


@beam.ptransform_fn
def reopen(pipeline: Any, places: Mapping[int, Packet]) -> PCollection:
    """Return the collection (key, packet) that `keep` kept at `places`."""
    created = pipeline | "Places" >> beam.Create(list(places.items()))
    return created | "Packets" >> beam.FlatMapTuple(lambda key, place: [(key, packet) for packet in read_places(place)])


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
