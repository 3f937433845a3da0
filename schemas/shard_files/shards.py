"""Shards of any table and file format; the name of a shard shows its format."""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pyarrow as pa

from schemas.errors import TableError
from schemas.manifest import Manifest, Shard, columns_of, publish, shard_url, unpublish
from schemas.shard_files import parquet
from schemas.shard_files.base import OpenShard
from schemas.shard_files.ranges import VERIFIED, Access, FetchedRanges, naming_damage
from schemas.shard_files.sinks import SINKS, Sink
from schemas.shard_files.viewed import ViewedShard
from schemas.storage import READ_ATTEMPTS, resolve


def write_shard(url: str, index: int, count: int, table: pa.Table, row_group_rows: int, sink: Sink) -> Shard:
    """Publish shard `index` of `count` under the prefix `url`, whole or not at all. Raises StorageError."""
    entry: Shard = _sinks()[sink].write_shard(url, index, count, table, row_group_rows)
    return entry


def write_table(
    url: str, kind: str, shards: Sequence[pa.Table], row_group_rows: int, sink: Sink = "parquet", **fields: object
) -> Manifest:
    """Publish a table from shards in memory (one process); `fields` become fields of the manifest.

    Raises StorageError.
    """
    unpublish(url)
    entries = [write_shard(url, i, len(shards), table, row_group_rows, sink) for i, table in enumerate(shards)]
    manifest = Manifest(
        kind=kind,
        columns=columns_of(shards[0].schema),
        shards=tuple(entries),
        rows=sum(entry.rows for entry in entries),
        row_group_rows=row_group_rows,
        **fields,  # type: ignore[arg-type]
    )
    return publish(url, manifest)


def open_shard(url: str, shard: Shard, access: Access = VERIFIED) -> OpenShard:
    """Open one shard for reading row groups; a damaged end is read again, because the network may have damaged it.

    Raises TableError if the shard is missing, truncated, or of an unknown format.
    """
    if shard.view is not None:
        file = open_shard(resolve(url, shard.view.table), shard.model_copy(update={"view": None}), access)
        return ViewedShard(file, url, shard.view)
    modules = (module for module in _sinks().values() if shard.path.endswith(f".{module.EXTENSION}"))
    module = next(modules, parquet)
    for _ in range(READ_ATTEMPTS - 1):
        with contextlib.suppress(TableError):
            return module.open_shard(url, shard, access)
    return module.open_shard(url, shard, access)


@cache
def _sinks() -> dict[str, Any]:
    """Import the modules of all kinds of shard files."""
    return {name: importlib.import_module(module) for name, module in SINKS.items()}


def iterate_shard(url: str, shard: Shard, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the row groups of one shard in storage order. Raises TableError."""
    with open_shard(url, shard) as file:
        for group in range(file.num_row_groups):
            yield read_group(file, group, columns, shard_url(url, shard))


def read_group(
    file: OpenShard, group: int, columns: Sequence[str] | None, place: str, pieces: FetchedRanges | None = None
) -> pa.Table:
    """Read row group `group` of an open shard, from `pieces` if these were fetched before and are not damaged.

    Damaged bytes are read again. Raises StorageError; TableError, which names `place` and the row group, if the bytes
    are still damaged.
    """
    names, table = list(columns) if columns else None, None
    for _ in range(0 if file.local else READ_ATTEMPTS - 1):
        with contextlib.suppress(TableError), naming_damage(place):
            table = file.read_row_group(group, names, pieces)
            break
        pieces = None
    if table is None:
        with naming_damage(f"{place}, row group {group}"):
            table = file.read_row_group(group, names, pieces)
    missing = set(columns or ()) - set(table.column_names)
    if missing:
        raise TableError(f"{place}: no column {', '.join(sorted(missing))}. Make the table again.")
    return table
