"""Shards of a table, opened and written by their kind; views of the shards of an earlier version."""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import TableError
from schemas.manifest import Manifest, Patch, Shard, View, columns_of, publish, read_patch, shard_url, unpublish
from schemas.options import SINKS, Sink
from schemas.ragged import offsets_of
from schemas.shard_files import parquet
from schemas.shard_files.parquet import number_column
from schemas.shard_files.ranges import VERIFIED, Access, FetchedRanges, OpenShard, Range, naming_damage
from schemas.storage import READ_ATTEMPTS, resolve

POSITION = "row"  # column of patches: a row's position in the file
RETIRED = "retired"  # column that a view of labels may have: false unless a patch sets it
_IDS = ("query_id", "label_id")


class ViewedShard(OpenShard):
    """An open shard of a view over `file`; empty row groups are skipped.

    Raises TableError if a patch is missing or damaged; StorageError.
    """

    def __init__(self, file: OpenShard, url: str, view: View) -> None:
        self._file, self.local = file, file.local
        self._source = file._source
        self._view = view
        self._columns = _read(url, view.columns)
        self.changed = _read(url, view.changed)
        gone = _read(url, view.gone)
        self._kept = np.ones(view.rows, bool)
        if gone is not None:
            self._kept[gone.column(POSITION).to_numpy()] = False
        starts = np.arange(0, view.rows, view.row_group_rows)
        self._bounds = np.append(starts, view.rows)  # first rows of the file's row groups
        live = np.add.reduceat(self._kept, starts, dtype=np.int64) if len(starts) else np.zeros(0, np.int64)
        self._groups = np.flatnonzero(live)
        self._first = view.first + offsets_of(live[self._groups])
        names = file.schema_arrow.names
        self._id = next((name for name in _IDS if name in names), None)
        over = [] if self._columns is None else self._columns.schema
        fields = {field.name: field for field in (*file.schema_arrow, *over)}
        if self._id == "label_id":
            fields.setdefault(RETIRED, pa.field(RETIRED, pa.bool_()))
        self.schema_arrow = pa.schema(list(fields.values()))
        self.num_row_groups = len(self._groups)
        self.memory = file.memory + view.rows + sum(t.nbytes for t in (self._columns, self.changed) if t is not None)

    def ranges(self, group: int, columns: Sequence[str] | None = None) -> list[Range]:
        return self._file.ranges(int(self._groups[group]), self._of_file(columns))

    def fetch(self, group: int, columns: Sequence[str] | None = None) -> FetchedRanges:
        return self._file.fetch(int(self._groups[group]), self._of_file(columns))

    def positions(self, group: int) -> np.ndarray:
        """Return the positions in the file, int64 [n], of the rows of row group `group`."""
        start, stop = self._bounds[self._groups[group] : self._groups[group] + 2]
        return start + np.flatnonzero(self._kept[start:stop])

    def read_row_group(
        self, group: int, columns: Sequence[str] | None = None, pieces: FetchedRanges | None = None
    ) -> pa.Table:
        names = self._of_file(columns)
        rows = {}
        start, stop = (int(bound) for bound in self._bounds[self._groups[group] : self._groups[group] + 2])
        if names:
            read = self._file.read_row_group(int(self._groups[group]), names, pieces)
            if read.num_rows != stop - start:
                raise ValueError(f"{read.num_rows} rows in a row group, expected {stop - start}")
            read = self._with_changes(read, start, stop)
            rows = dict(zip(read.column_names, read.columns, strict=True))
        if self._columns is not None:
            of_group = self._columns.slice(start, stop - start)
            rows |= {name: of_group.column(name) for name in of_group.column_names if _wanted(name, columns)}
        if self._id == "label_id" and RETIRED not in rows and _wanted(RETIRED, columns):
            rows[RETIRED] = pa.chunked_array([np.zeros(stop - start, bool)])
        kept = self._kept[start:stop]
        if not kept.all():
            rows = {name: column.filter(pa.array(kept)) for name, column in rows.items()}
        if self._id is not None and _wanted(self._id, columns):
            rows[self._id] = pa.chunked_array([np.arange(self._first[group], self._first[group + 1])])
        order = [name for name in self.schema_arrow.names if name in rows]
        schema = pa.schema([pa.field(name, rows[name].type, nullable=False) for name in order])
        return pa.Table.from_arrays([rows[name] for name in order], schema=schema)

    def close(self) -> None:
        self._file.close()

    def _of_file(self, columns: Sequence[str] | None) -> list[str]:
        """Return the columns that are read from the file."""
        over = {self._id, *(() if self._columns is None else self._columns.column_names)}
        return [name for name in self._file.schema_arrow.names if name not in over and _wanted(name, columns)]

    def _with_changes(self, rows: pa.Table, start: int, stop: int) -> pa.Table:
        """Return the file's rows [start, stop) with the changed values of the view."""
        if self.changed is None:
            return rows
        positions = number_column(self.changed, POSITION)
        inside = np.flatnonzero((positions >= start) & (positions < stop))
        if not len(inside):
            return rows
        changed, take = self.changed.take(pa.array(inside)), np.arange(rows.num_rows)
        take[positions[inside] - start] = rows.num_rows + np.arange(len(inside))
        for number, name in enumerate(rows.column_names):
            if name in changed.column_names:
                column = rows.column(number)
                both = pa.chunked_array([*column.chunks, *changed.column(name).cast(column.type).chunks], column.type)
                rows = rows.set_column(number, rows.schema.field(number), both.take(pa.array(take)))
        return rows


def _wanted(name: str, columns: Sequence[str] | None) -> bool:
    return columns is None or name in columns


def _read(url: str, patch: Patch | None) -> pa.Table | None:
    return None if patch is None else pq.read_table(pa.BufferReader(read_patch(url, patch)))


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
