"""Rows of a published table by number and by key, read from the row groups that hold them."""

import bisect
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.sharding.hashing import hash_strings
from schemas.manifest import Manifest, shard_url
from schemas.shard_files.parquet import row_groups_of
from schemas.shard_files.shards import open_shard, read_group


class Rows:
    """Reader of the rows of the table at `url`. All methods raise TableError over damage."""

    def __init__(self, url: str, manifest: Manifest) -> None:
        self.url, self.manifest = url, manifest
        self._shard, self._group, self._first = row_groups_of(manifest)

    @property
    def columns(self) -> list[str]:
        return [column.name for column in self.manifest.columns]

    @property
    def groups(self) -> int:
        """Return the number of row groups."""
        return len(self._shard)

    def group(self, number: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read row group `number`, in [0, groups), of the whole table."""
        return next(self._read(np.asarray([number]), columns))

    def read(self, rows: np.ndarray, columns: Sequence[str] | None = None) -> pa.Table:
        """Read rows [B] in ascending order, each once; `rows` int64, in [0, N)."""
        rows = np.unique(np.asarray(rows, np.int64))
        if len(rows) and not 0 <= rows[0] <= rows[-1] < self.manifest.rows:
            raise ValueError(f"rows in [{rows[0]}, {rows[-1]}] of a table of {self.manifest.rows}")
        group_of = np.searchsorted(self._first, rows, "right") - 1
        numbers = np.unique(group_of)
        parts = [
            group.take(pa.array(rows[group_of == number] - self._first[number]))
            for number, group in zip(numbers.tolist(), self._read(numbers, columns), strict=True)
        ]
        return pa.concat_tables(parts) if parts else pa.table({name: [] for name in columns or self.columns})

    def find(self, key: str) -> int | None:
        """Return the row with this key, or None.

        `extremis shard` orders rows by a salted hash of the key, so a bisection reads a few row groups. Of a table in
        another order the keys are read from the start.
        """
        for number in (*self._likely_group(key), *range(self.groups)):
            position = pc.index(self._keys(number), key).as_py()
            if position >= 0:
                return int(self._first[number]) + int(position)
        return None

    def _read(self, numbers: np.ndarray, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        """Yield row groups in ascending order; each shard is opened once."""
        for index in np.unique(self._shard[numbers]).tolist():
            shard = self.manifest.shards[index]
            with open_shard(self.url, shard) as file:
                for number in numbers[self._shard[numbers] == index].tolist():
                    yield read_group(file, int(self._group[number]), columns, shard_url(self.url, shard))

    def _likely_group(self, key: str) -> list[int]:
        """Find the row group that has the key if rows are in the order of its hash; empty where none can have it."""
        seed = self.manifest.parameters.get("seed")
        if not isinstance(seed, int):
            return []

        def last_hash(number: int) -> np.uint64:
            return hash_strings(self._keys(number), seed)[-1]

        target = hash_strings(pa.array([key], pa.string()), seed)[0]
        number = bisect.bisect_left(range(self.groups), target, key=last_hash)
        return [number] if number < self.groups else []

    def _keys(self, number: int) -> pa.Array:
        return self.group(number, ["key"]).column("key").combine_chunks()
