"""Find a row of a table by its key."""

import bisect

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.sharding.hashing import hash_strings
from schemas.table import Table


def find_row(table: Table, key: str) -> int | None:
    """Return the row with this key, or None. Raises TableError over damage.

    `extremis shard` orders rows by a salted hash of the key, so a bisection reads a few row groups. Of a table in
    another order the keys are read from the start.
    """
    for number in (*_likely_group(table, key), *range(len(table.groups))):
        position = pc.index(_keys(table, number), key).as_py()
        if position >= 0:
            return int(table.groups.first[number]) + int(position)
    return None


def _likely_group(table: Table, key: str) -> list[int]:
    """Find the row group that has the key if rows are in the order of its hash; empty where none can have it."""
    seed = table.parameters.get("seed")
    if not isinstance(seed, int):
        return []

    def last_hash(number: int) -> np.uint64:
        return hash_strings(_keys(table, number), seed)[-1]

    target = hash_strings(pa.array([key], pa.string()), seed)[0]
    number = bisect.bisect_left(range(len(table.groups)), target, key=last_hash)
    return [number] if number < len(table.groups) else []


def _keys(table: Table, number: int) -> pa.Array:
    return table.read_group(number, ["key"]).column("key").combine_chunks()
