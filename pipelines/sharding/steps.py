"""Steps that queries and labels share: tokenize texts, send rows to shards, number shards, report rejects."""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.flow import (
    Collection,
    FileExchange,
    Flow,
    Packet,
    pack_locations,
    read_locations,
    send_together,
    split_by,
)
from pipelines.formats.base import Reject, rejects_batch
from pipelines.job import REJECTED, SHOWN, Summary
from pipelines.sharding import tokenizer
from pipelines.sharding.plans import TablePlan
from pipelines.sharding.tokenizer import ColumnTokenizer
from schemas import storage
from schemas.shard_files import parquet

ROWS, SIZES = "rows", "sizes"


def open_column_tokenizer(plan: TablePlan) -> ColumnTokenizer | None:
    """Open the tokenizer of `plan`, once per process; None if no row has a text. Raises StorageError."""
    return None if plan.vocabulary is None else _open_tokenizer(plan.tokenizer, plan.tokenizer_name)


@functools.lru_cache(maxsize=1)
def _open_tokenizer(url: str, name: str) -> ColumnTokenizer:
    return ColumnTokenizer(tokenizer.open_tokenizer(storage.read_sealed(url), url), name)


def encode(batch: pa.RecordBatch, plan: TablePlan, column_tokenizer: ColumnTokenizer | None) -> pa.RecordBatch:
    """Add `truncated` to parsed rows, `input_ids` if rows have texts, and `dense` if a model computes vectors."""
    rows = batch.num_rows
    if column_tokenizer is None:
        values, offsets, truncated = np.zeros(0, np.uint32), np.zeros(rows + 1, np.int64), np.zeros(rows, bool)
    else:
        values, offsets, truncated = column_tokenizer.encode(batch["text"])
    batch = batch.append_column("truncated", pa.array(truncated))
    if plan.tokens is not None:
        batch = batch.append_column("input_ids", parquet.list_array(values, offsets, plan.tokens))
    if plan.embedder is not None:
        from pipelines.models import dense_column  # needs the trainer's packages, which may be missing

        column = dense_column(plan.embedder, batch["text"], plan.dense, plan.threads)
        batch = batch.append_column("dense", column)
    return batch


def by_shard(batch: pa.RecordBatch, shards: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Split rows by the column `hash`: yield (shard, rows of the shard)."""
    yield from split_by(batch, (batch["hash"].to_numpy() % np.uint64(shards)).astype(np.int64))


def store_packets(packets: Collection, name: str, files: FileExchange) -> Collection:
    """Store (key, packet in files) as the collection `name` for a later flow; return a Summary of the locations."""
    return packets.group(f"{name} by key").map_partitions(f"Keep {name}", _store_locations, name, files)


def _store_locations(
    groups: Iterable[tuple[int, Iterable[Packet]]], name: str, files: FileExchange
) -> Iterator[Summary]:
    """Write, for each key, the locations of the key's packets, with many keys per file."""
    places = ((key, pack_locations(packets)) for key, packets in groups)
    yield from (Summary(kept={name: dict([sent])}) for sent in send_together(files, places))


def load_packets(flow: Flow, kept: Summary, name: str) -> Collection:
    """Return the collection of (key, packet) that `store_packets` stored as `name`."""
    return flow.create(f"Kept {name}", kept.kept.get(name, {}).items()).flat_map(f"Reopen {name}", _packets_of)


def _packets_of(element: tuple[int, Packet]) -> Iterator[tuple[int, Packet]]:
    key, place = element
    yield from ((key, packet) for packet in read_locations(place))


def first_ids(sizes: Mapping[int, int]) -> np.ndarray:
    """Compute first int64 [shards + 1] from the shards' sizes: shard s contains ids [first[s], first[s + 1])."""
    return np.concatenate([[0], np.cumsum([sizes[shard] for shard in range(len(sizes))], dtype=np.int64)])


def report_rejects(table: str, rejects: list[Reject], exchange: FileExchange, **fields: Any) -> Summary:
    """Write the `rejects` of an input table to staging through `exchange`, and return a Summary of the rejects."""
    packets = exchange.send([(table, rejects_batch(rejects))]) if rejects else ()
    counts = {**fields.pop("counters", {}), REJECTED + table: Counter(reject.reason.value for reject in rejects)}
    return Summary(counters=counts, rejects=tuple(sorted(rejects)[:SHOWN]), rejected=tuple(packets), **fields)
