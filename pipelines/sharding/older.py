"""Shards of older points that may have the keys of new ones: the same hash names them."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from pipelines.common.exchange import split_by
from pipelines.sharding.plans import OlderShards
from schemas.manifest import Shard


def older_shards(views: Sequence[Shard]) -> tuple[OlderShards, ...]:
    """Return the tables that `views` come from, with the places of their shards: `part-00007-of-00064` is 7 of 64."""
    tables: dict[str, dict[int, int]] = {}
    counts: dict[str, int] = {}
    for number, entry in enumerate(views):
        assert entry.view is not None
        _, index, _, count = entry.path.partition(".")[0].split("-")
        tables.setdefault(entry.view.table, {})[int(index)] = number
        counts[entry.view.table] = int(count)
    return tuple(
        OlderShards(counts[table], tuple(numbers.get(index, -1) for index in range(counts[table])))
        for table, numbers in tables.items()
    )


def route_keys(batch: pa.RecordBatch, older: Sequence[OlderShards]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (number of an older shard, keys that it may have) of rows with `hash` and `key`."""
    keys, hashes = batch.select(["key"]), batch["hash"].to_numpy()
    for table in older:
        numbers = np.array(table.numbers, np.int64)[(hashes % np.uint64(table.count)).astype(np.int64)]
        for number, some in split_by(keys, numbers):
            if number >= 0:
                yield number, some
