"""Tables: a table consists of shards and a manifest below a URL, and is read by rows."""

import fnmatch
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from schemas import manifest as manifests
from schemas import storage
from schemas.errors import InputError, TableError, option
from schemas.layout import RunLayout, epoch_folder, list_numbers
from schemas.manifest import Manifest, Shard, is_published
from schemas.ragged import offsets_of

PARTS = "parts"  # parameter of a table of several parts
_IDS = ("query_id", "label_id")


@dataclass(frozen=True)
class RowGroupIndex:
    """All M row groups of a table in storage order: row group m is row group `group[m]` of shard `shard[m]`.

    Row group m contains rows [first[m], first[m + 1]). `shard` and `group` are int64 [M], `first` is int64 [M + 1].
    """

    shard: np.ndarray
    group: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.shard)

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the row group, int64 [B], of each of `rows` [B], all in [0, N)."""
        return np.searchsorted(self.first, rows, side="right") - 1


@dataclass(frozen=True)
class PartTable:
    """A part of a table: its name, the URL and digest of the table that contains its shards, and its remaining rows.

    The part has shards [first, stop) of the table of all parts.
    """

    name: str
    table: str
    digest: str
    rows: int
    first: int
    stop: int


@dataclass(frozen=True)
class Table:
    """Published table at `url`. Opening is cheap: only the manifest is read until rows are requested. Picklable.

    Reading raises TableError if a shard is missing or damaged, StorageError. Rows count from 0 in storage order; row
    groups are numbered over the whole table.
    """

    url: str
    manifest: Manifest

    @classmethod
    def open(cls, url: str, kind: str | None = None) -> "Table":
        """Open the table at `url`.

        Raises TableError if there is no finished table of `kind`, or if the table is damaged; StorageError.
        """
        return cls(url, manifests.open_manifest(url, kind))

    @classmethod
    def find(cls, url: str, kind: str | None = None) -> "Table | None":
        """Open the table at `url`; None if there is no finished table. Raises TableError as `open` does."""
        try:
            return cls.open(url, kind) if manifests.is_published(url) else None
        except TableError:
            if manifests.is_published(url):
                raise
            return None  # the table disappeared, for example because a trainer resumed from an earlier checkpoint

    def __reduce__(self) -> tuple[Any, ...]:
        return Table, (self.url, self.manifest)  # without cached values

    @property
    def kind(self) -> str:
        """Kind of the table, one of `schemas.manifest.KINDS`."""
        return self.manifest.kind

    @property
    def rows(self) -> int:
        """Number of rows, N."""
        return self.manifest.rows

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Manifest entries of the shards, in storage order."""
        return self.manifest.shards

    @property
    def parents(self) -> Mapping[str, str]:
        """Digests of the inputs that the table was built from, by name."""
        return self.manifest.parents

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Parameters that the table was built with."""
        return self.manifest.parameters

    @property
    def shard_sizes(self) -> list[tuple[int, int | tuple[int, ...]]]:
        """Rows and row groups of each shard; tables with equal cuts are aligned."""
        return [(entry.rows, self.manifest.group_rows(shard)) for shard, entry in enumerate(self.shards)]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest; other tables list this digest among their parents."""
        return self.manifest.digest

    @property
    def ids_of(self) -> str:
        """Meaning of `label_ids` in a table of negatives: "labels", or "points"."""
        return "points" if self.parameters.get("by") == "points" else "labels"

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return [column.name for column in self.manifest.columns]

    @cached_property
    def schema(self) -> pa.Schema:
        """Columns and types of the first shard. Raises IndexError if the table has no shard."""
        from schemas.shard_files import shards

        with shards.open_shard(self.url, self.shards[0]) as file:
            return file.schema_arrow

    @property
    def id_column(self) -> str:
        """Name of the id column. Raises StopIteration if the table has no id column."""
        return next(name for name in _IDS if name in self.columns)

    def width(self, column: str) -> int:
        """Return the list length K of a column, from its type, such as `fixed_size_list<element: float>[64]`.

        Raises TableError if the table has no such column.
        """
        types = {entry.name: entry.type for entry in self.manifest.columns}
        size = re.search(r"\[(\d+)\]$", types.get(column, ""))
        if size is None:
            raise TableError(f"{self.url}: this {self.kind} table has no column {column}. Make the table again.")
        return int(size[1])

    @property
    def dimension(self) -> int:
        """D of the column `vector`. Raises TableError if the table has no such column."""
        return self.width("vector")

    @cached_property
    def groups(self) -> RowGroupIndex:
        """All row groups; only the manifest is read."""
        size = self.manifest.row_group_rows or 1
        sizes = [
            np.asarray(entry.groups or np.minimum(size, entry.rows - np.arange(0, entry.rows, size)), np.int64)
            for entry in self.shards
        ]
        counts = np.array([len(of_shard) for of_shard in sizes], np.int64)
        shard = np.repeat(np.arange(len(counts)), counts)
        rows = np.concatenate([np.empty(0, np.int64), *sizes])
        return RowGroupIndex(shard, np.arange(len(shard)) - offsets_of(counts)[shard], offsets_of(rows))

    def batches(
        self, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
    ) -> Iterator[pa.Table]:
        """Yield rows [start, stop) in storage order, one row group at a time (or the part that is in the range)."""
        stop = self.rows if stop is None else min(stop, self.rows)
        if start >= stop:
            return
        begin, end = self.groups.of_rows(np.array([start, stop - 1])).tolist()
        for first, group in self.read_groups(range(begin, end + 1), columns):
            low, high = max(start - first, 0), min(stop - first, group.num_rows)
            yield group if high - low == group.num_rows else group.slice(low, high - low)

    def batches_of(self, shard: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the row groups of shard `shard` in storage order."""
        from schemas.shard_files import shards  # opening a table needs no Parquet reader

        yield from shards.iterate_shard(self.url, self.shards[shard], columns)

    def read(self, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None) -> pa.Table:
        """Read rows [start, stop) into memory. Raises ValueError if the range is empty."""
        return pa.concat_tables(self.batches(columns, start, stop))

    def read_group(self, number: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read row group `number`, in [0, M)."""
        return next(self.read_groups([number], columns))[1]

    def read_groups(
        self, numbers: Iterable[int], columns: Sequence[str] | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield (first row, rows) of the row groups `numbers`; consecutive groups of one shard share one open file."""
        from schemas.shard_files import shards

        groups = self.groups
        for shard, of_shard in itertools.groupby(numbers, key=lambda number: int(groups.shard[number])):
            entry = self.shards[shard]
            with shards.open_shard(self.url, entry) as file:
                place = manifests.shard_url(self.url, entry)
                for number in of_shard:
                    yield int(groups.first[number]), shards.read_group(file, int(groups.group[number]), columns, place)

    def rows_at(self, rows: np.ndarray, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows `rows` in ascending order, each row once. Raises ValueError for rows outside of [0, N)."""
        rows = np.unique(np.asarray(rows, np.int64))
        if len(rows) and not 0 <= rows[0] <= rows[-1] < self.rows:
            raise ValueError(f"rows in [{rows[0]}, {rows[-1]}] of a table of {self.rows}")
        numbers, counts = np.unique(self.groups.of_rows(rows), return_counts=True)
        wanted = np.split(rows, np.cumsum(counts)[:-1])
        groups = self.read_groups(numbers.tolist(), columns)
        taken = [group.take(pa.array(some - first)) for some, (first, group) in zip(wanted, groups, strict=False)]
        return pa.concat_tables(taken) if taken else pa.table({name: [] for name in columns or self.columns})

    def vectors(self, groups: Iterable[int] | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, vectors [n, D]) of the row groups `groups`; None: all row groups."""
        from schemas.shard_files.parquet import matrix_column

        numbers = range(len(self.groups)) if groups is None else groups
        for first, rows in self.read_groups(numbers, ["vector"]):
            yield first, matrix_column(rows, "vector")

    def aligned_with(
        self, other: "Table", shard: int, columns: Sequence[str] | None = None
    ) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield each row group of shard `shard` from both tables: `columns` of this table, all columns of `other`.

        Raises TableError if the ids of the two tables differ.
        """
        own, others = self.batches_of(shard, columns), other.batches_of(shard)
        for rows, joined in zip(own, others, strict=True):
            if not rows.column(self.id_column).equals(joined.column(0)):
                raise TableError(
                    f"{other.shard_url(shard)}: the column {joined.column_names[0]} differs from the column of "
                    f"{self.shard_url(shard)}. Make the {other.kind} again."
                )
            yield rows, joined

    def require_made_from(self, name: str, parent: "Table") -> None:
        """Refuse this table if its parent `name` is not `parent`. Raises TableError, which names both tables."""
        got = self.parents.get(name)
        if got != parent.digest:
            raise TableError(
                f"{self.url}: this {self.kind} table was built from a {name} table with digest {str(got)[:12]}…, but "
                f"{parent.url} has digest {parent.digest[:12]}…. Make the {self.kind} table again from {parent.url}, "
                "or give the data that it was built from."
            )

    def require_ids_of(self, what: str) -> None:
        """Refuse a table of negatives unless its ids are `what`. Raises TableError."""
        if self.ids_of != what:
            given = f"{self.url}: the ids of this table are {self.ids_of}, expected {what}"
            how = "with" if what == "points" else "without"
            raise TableError(f"{given}. Mine a table {how} {option('by', 'points')}.")

    def require_aligned(self, rows: "Table", remedy: str) -> None:
        """Refuse this table if it was built from rows other than `rows`, or if its row groups differ.

        Raises TableError.
        """
        self.require_made_from("queries", rows)
        if self.shard_sizes != rows.shard_sizes:
            own, others = (
                f"{[entry.rows for entry in table.shards]} rows in row groups of {table.manifest.row_group_rows}"
                for table in (self, rows)
            )
            raise TableError(f"{self.url}: not aligned with {rows.url}: got {own}, expected {others}. {remedy}")

    def verify(self, on_bytes: Callable[[int], None] | None = None) -> None:
        """Read every shard in pieces and check its length and SHA-256; `on_bytes(bytes)` is called after each piece."""
        for shard in self.shards:
            manifests.verify_shard(self.url, shard, on_bytes=on_bytes)
            for patch in shard.view.patches if shard.view else ():
                manifests.read_patch(self.url, patch)

    def shard_url(self, shard: int) -> str:
        """Return the URL of shard `shard`."""
        return manifests.shard_url(self.url, self.shards[shard])

    def read_files(self) -> dict[str, bytes]:
        """Read the files of a table without rows, by name, and verify their checksums."""
        return {entry.path: manifests.read_shard(self.url, entry) for entry in self.shards}

    @property
    def parts(self) -> tuple[PartTable, ...]:
        """Parts of the table, oldest first; empty if the data set has no earlier version."""
        return tuple(PartTable(**part) for part in self.parameters.get(PARTS, ()))

    def choose_parts(self, window: str | Sequence[str]) -> list[PartTable]:
        """Return the parts that `window` names: `last N`, a pattern, a list of names, all for "". Raises InputError."""
        names = ", ".join(part.name for part in self.parts)
        if not self.parts:
            raise InputError(
                f"{self.url}: this table is not divided into parts, because its data set has no earlier version. Leave "
                "out the options that select or weight parts."
            )
        if isinstance(window, str):
            last = re.fullmatch(r"last (\d{1,9})", window.strip())
            if last:
                named = list(self.parts[-int(last[1]) :]) if int(last[1]) else []
            else:
                named = [part for part in self.parts if fnmatch.fnmatchcase(part.name, window or "*")]
        else:
            missing = sorted({*window} - {part.name for part in self.parts})
            if missing:
                raise InputError(f"parts: {self.url} has no part {', '.join(missing)}; it has {names}.")
            named = [part for part in self.parts if part.name in window]
        if not named:
            raise InputError(f"parts = {window!r}: {self.url} has no such part; it has {names}.")
        return named

    def by_part(self) -> "list[Table]":
        """Return the rows of each part as a table; only this table if it is not divided into parts."""
        return [self.of_parts([part]) for part in self.parts] or [self]

    def of_parts(self, parts: Sequence[PartTable]) -> "Table":
        """Return the rows of some parts as a table, which has a subset of this table's shards and keeps the row ids.

        The new table is not stored, and is the same on every machine. `id_range` is None if there are gaps.
        """
        shards = tuple(shard for part in parts for shard in self.shards[part.first : part.stop])
        rows = sum(shard.rows for shard in shards)
        first = sum(shard.rows for shard in self.shards[: parts[0].first])
        neighbours = len(shards) == parts[-1].stop - parts[0].first
        edges = itertools.pairwise(itertools.accumulate((part.stop - part.first for part in parts), initial=0))
        own = [vars(replace(part, first=start, stop=stop)) for part, (start, stop) in zip(parts, edges, strict=True)]
        changes = {
            "shards": shards,
            "rows": rows,
            "id_range": (first, first + rows) if neighbours else None,
            "parameters": {**self.parameters, PARTS: own},
        }
        return Table(self.url, self.manifest.model_copy(update=changes))


def rechunk(tables: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Yield the same rows in contiguous tables of exactly `rows` rows each; the last table may be shorter."""
    pending: list[pa.Table] = []
    held = 0
    for table in tables:
        pending.append(table)
        held += table.num_rows
        if held < rows:
            continue
        ready = pa.concat_tables(pending)
        full = held - held % rows
        for start in range(0, full, rows):
            yield ready.slice(start, rows).combine_chunks()
        pending, held = [ready.slice(full)], held - full
    if held:
        yield pa.concat_tables(pending).combine_chunks()


@dataclass(frozen=True)
class Request:
    """A requested table: its kind, the digests of its parents, and the parameters that determine its content.

    If `parents` is None, the parameters contain the parents. `section`: name of the manifest's parameter that contains
    the other parameters. A parameter that a manifest lacks counts as None; additional parameters are ignored.
    """

    kind: str
    parents: Mapping[str, str] | None
    parameters: Mapping[str, Any]
    section: str | None = None


def find_reusable(
    url: str,
    request: Request,
    remedy: str,
    *,
    overwrite: bool = False,
    is_stale: Callable[[Mapping[str, Any]], bool] | None = None,
    check_replaceable: Callable[[str, Manifest], None] | None = None,
) -> Manifest | None:
    """Return the table at `url` if it is the requested table; None if the table must be built.

    A table with different options is rebuilt if `overwrite` is true, or if its parents differ and
    `is_stale(parameters)` is true because its input was rewritten. `check_replaceable` is called first. Raises
    InputError for any other table; the message names the differences and ends with `remedy`.
    """
    if not is_published(url):
        return None
    manifest = Table.open(url).manifest
    recorded = manifest.parameters.get(request.section) if request.section else manifest.parameters
    if manifest.kind != request.kind or recorded is None:
        raise InputError(
            f"{url}: contains a finished {manifest.kind} table, but this command writes a {request.kind} table. Give "
            "another path."
        )
    made_from, wanted = manifest.parents, manifest.parents if request.parents is None else request.parents
    changes = [f"other {name}" for name in sorted({*made_from, *wanted}) if made_from.get(name) != wanted.get(name)]
    for name, value in json.loads(json.dumps(request.parameters)).items():
        changes += _changes(name, recorded.get(name), value)
    if not changes:
        return manifest
    if not (overwrite or (is_stale is not None and made_from != wanted and is_stale(recorded))):
        raise InputError(
            f"{url}: contains a finished {manifest.kind} table that was made with other options "
            f"({'; '.join(changes)}). {remedy}"
        )
    if check_replaceable is not None:
        check_replaceable(url, manifest)
    return None


def find_by_parents(url: str, kind: str, parents: Mapping[str, str]) -> Manifest | None:
    """Return the table at `url` if it was built from these parents, whatever its parameters. Raises TableError."""
    table = Table.find(url, kind)
    return table.manifest if table is not None and table.parents == parents else None


def _changes(name: str, before: Any, after: Any) -> Iterator[str]:
    nested = [value for value in (before, after) if isinstance(value, Mapping)]
    if len(nested) == 2 and not any("sha256" in value for value in nested):
        for key in sorted({*before, *after}):
            yield from _changes(f"{name}.{key}", before.get(key), after.get(key))
    elif before != after:
        yield f"{name} was {_shown(before)}, now it is {_shown(after)}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and "sha256" in value:
        return f"{value.get('file')} ({value.get('bytes')} bytes, SHA-256 {str(value['sha256'])[:12]}…)"
    return "not set" if value is None else repr(value)


class RunTable(NamedTuple):
    """A table for the source `queries` or `labels`, which training uses from `epoch` on."""

    epoch: int
    source: str
    table: Table


def run_tables(run: RunLayout, source: str | None = None, before: int | None = None) -> Iterator[RunTable]:
    """Yield the run's finished tables, newest first; if given, only tables of `source`, or of epochs before `before`.

    Raises TableError, StorageError.
    """
    for epoch in reversed(list_numbers(run.negatives_root)):
        if before is not None and epoch >= before:
            continue
        for name in storage.list_names(epoch_folder(run.negatives_root, epoch)) if source is None else [source]:
            if name.startswith("."):  # a claim and candidates of a miner that is working or was killed
                continue
            if (table := Table.find(run.negatives(epoch, name), "negatives")) is not None:
                yield RunTable(epoch, name, table)
