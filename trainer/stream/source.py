"""A source of training rows: a queries-like table, the meaning of its positives, and the negatives joined to it."""

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from schemas import tables
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout
from schemas.manifest import Manifest, Shard, open_manifest, require_parent
from schemas.parquet import list_array, row_groups_of
from schemas.shards import OpenShard, open_shard, read_group
from schemas.storage import join
from trainer.config import LABEL_TEXTS, MOST_WEIGHT
from trainer.inputs import Kind, columns_of, require_inputs
from trainer.stream.mixing import Share


@dataclass(frozen=True)
class Table:
    """A published table: where it is and what its manifest says."""

    url: str
    manifest: Manifest

    @classmethod
    def open(cls, url: str, kind: str) -> "Table":
        """Raises TableError when it is unfinished, foreign or damaged."""
        return cls(url, open_manifest(url, kind))


@dataclass(frozen=True)
class Source:
    """Rows of `table`; a point's positives are its `label_ids`, or, for a labels table, the label itself.

    `negatives` is aligned with `table`: shard by shard, row group by row group, row by row, so the join is a zip.
    An epoch deals each row `weight` times, rounded up or down (`mixing`). Raises InputError where that cannot be.
    """

    name: str  # 'queries', 'labels', or the split's where several are mixed
    table: Table
    negatives: Table | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.weight <= MOST_WEIGHT and math.isfinite(self.weight)):
            raise InputError(
                f"source {self.name}: a weight of {self.weight:g}; expected one above 0 and up to {MOST_WEIGHT}. "
                "Leave out a source that is not to be dealt."
            )

    @property
    def rows(self) -> int:
        return self.table.manifest.rows

    def with_negatives(self, url: str | None) -> "Source":
        """The same rows joined with the table at `url`. Raises TableError when it was made from other rows."""
        if url is None:
            return replace(self, negatives=None)
        negatives = Table.open(url, "negatives")
        require_parent(url, negatives.manifest, "queries", self.table.manifest.digest, self.table.url)
        same = [shard.rows for shard in negatives.manifest.shards] == [s.rows for s in self.table.manifest.shards]
        if not same or negatives.manifest.row_group_rows != self.table.manifest.row_group_rows:
            raise TableError(f"{url}: its shards or row groups do not line up with {self.table.url}. Mine it again.")
        return replace(self, negatives=negatives)


def open_queries(data: DataLayout, split: str) -> Table:
    """The queries of `split`. Raises InputError where DATA has no such split, TableError when it is not finished."""
    prefix = "queries/"
    splits = [name.removeprefix(prefix) for name in open_manifest(data.root, "data").parents if name.startswith(prefix)]
    if split not in splits:
        raise InputError(f"{data.root}: no split {split!r}; this data set has {', '.join(sorted(splits))}.")
    return Table.open(data.queries(split), "queries")


def open_sources(
    data: DataLayout, split: str, label_texts: bool, inputs: Kind = "tokens", mix: Mapping[str, float] | None = None
) -> list[Source]:
    """The training points: `split`, and the label texts where asked; or with `mix` the splits that it weighs, by name.

    Raises InputError where there is no such split, or they lack what `inputs` reads; TableError.
    """
    if mix:
        # Sorted, so that a recipe may name them in any order: it decides the row ids.
        splits = sorted(name for name in mix if name != LABEL_TEXTS)
        sources = [Source(name, open_queries(data, name), weight=mix[name]) for name in splits]
    else:
        sources = [Source("queries", Table.open(data.queries(split), "queries"))]
    if LABEL_TEXTS in mix if mix else label_texts:
        weight = mix[LABEL_TEXTS] if mix else 1.0
        sources.append(Source(LABEL_TEXTS, Table.open(data.labels, "labels"), weight=weight))
    for source in sources:
        require_inputs(source.table.url, source.table.manifest, inputs)
    return sources


class RowGroups:
    """Reads row groups of several sources as if they were one table; safe to use from several threads.

    Row groups are numbered source by source in storage order; row ids likewise.
    """

    OPEN_FILES = 32  # per thread

    def __init__(self, sources: list[Source], label_type: pa.DataType, inputs: Kind = "tokens") -> None:
        self.sources = sources
        self._inputs = columns_of(inputs)
        self._label_type = label_type
        self._width = max((_width(source) for source in sources), default=0)
        places: list[tuple[int, int, int]] = []
        starts: list[np.ndarray] = []
        shares: list[Share] = []
        base = 0
        for number, source in enumerate(sources):
            shard, group, first = row_groups_of(source.table.manifest)
            places += [(number, int(s), int(g)) for s, g in zip(shard, group, strict=True)]
            starts.append(first[:-1] + base)
            base += int(first[-1])
            shares.append(Share(len(shard), source.weight))
        self._places = places
        # Empty where every row is dealt once.
        self.mix = () if all(source.weight == 1 for source in sources) else tuple(shares)
        self.first_row = np.concatenate([*starts, [base]]).astype(np.int64)
        self._files = threading.local()

    @cached_property
    def group_rows(self) -> np.ndarray:
        """Rows of each row group, [M]."""
        return np.diff(self.first_row)

    @property
    def width(self) -> int:
        """K of the joined negatives; 0 where there are none."""
        return self._width

    def read(self, group: int) -> pa.Table:
        """Row group `group` as columns of the inputs, `label_ids` and, joined, `hard`. Raises TableError."""
        number, shard, within = self._places[group]
        source = self.sources[number]
        if source.table.manifest.kind == "labels":
            rows = self._read(source.table, shard, within, ["label_id", *self._inputs])
            ids = rows.column("label_id").to_numpy()
            positives = list_array(ids, np.arange(len(ids) + 1), self._label_type)
        else:
            rows = self._read(source.table, shard, within, [*self._inputs, "label_ids"])
            positives = rows.column("label_ids").cast(pa.list_(self._label_type))
        columns = {**{name: rows.column(name) for name in self._inputs}, "label_ids": positives}
        if self._width:
            columns["hard"] = self._hard(source, shard, within, rows.num_rows)
        return pa.table(columns)

    def ahead(self, groups: Iterable[int]) -> None:
        """Row groups that will be read soon."""

    def close(self) -> None:
        """Stop what `ahead` has begun."""

    def _hard(self, source: Source, shard: int, group: int, rows: int) -> pa.ChunkedArray | pa.Array:
        kind = pa.list_(self._label_type, self._width)
        if source.negatives is None:
            pads = pa.array(np.full(rows * self._width, tables.PAD), self._label_type)
            return pa.FixedSizeListArray.from_arrays(pads, self._width)
        joined = self._read(source.negatives, shard, group, ["label_ids"]).column("label_ids")
        if len(joined) != rows:
            raise TableError(
                f"{source.negatives.url}: shard {shard}, row group {group} has {len(joined)} rows, "
                f"its queries have {rows}. Mine it again."
            )
        return joined.cast(kind)

    def _read(self, table: Table, shard: int, group: int, columns: list[str]) -> pa.Table:
        entry = table.manifest.shards[shard]
        return read_group(self._file(table.url, entry), group, columns, join(table.url, entry.path))

    def _file(self, url: str, shard: Shard) -> OpenShard:
        files: OrderedDict[str, OpenShard] = self._files.__dict__.setdefault("open", OrderedDict())
        place = join(url, shard.path)
        if place in files:
            files.move_to_end(place)
        else:
            files[place] = open_shard(url, shard)
            if len(files) > self.OPEN_FILES:
                files.popitem(last=False)[1].close()
        return files[place]


def _width(source: Source) -> int:
    if source.negatives is None:
        return 0
    for column in source.negatives.manifest.columns:
        if column.name == "label_ids":
            return int(column.type.rsplit("[", 1)[1].rstrip("]"))
    raise TableError(f"{source.negatives.url}: a negatives table without label_ids. Mine it again.")
