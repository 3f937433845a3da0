"""What every input form offers: where its files are, raw blocks of them, and normalised columns with their rejects.

Parsers never raise over a bad row: it becomes a Reject. They raise InputError only for what makes a file unusable.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa

from pipelines.formats.rejects import Reject
from schemas.shard_files import parquet

SPLITS = ("train", "val", "test")
LABELS = "labels"
PAIRS = "pairs/"  # a table `pairs/train` holds (query_key, label_key) of the split `train`


@dataclass(frozen=True)
class Part:
    """Files that are read together, line n of one with line n of the others; `files` maps a role to a URL.

    A table (a split, `labels`, `pairs/<split>`) may have many parts. `name` is what messages and rejects call it.
    `rows` is for a part without files: the number of its rows, which nothing but a header states.
    """

    table: str
    name: str
    files: Mapping[str, str]
    rows: int | None = None


@dataclass(frozen=True)
class Inputs:
    """One data set as found at a source.

    keyed: labels are named by string keys and the pipeline makes the ids; else a label is its 0-based line, as in XC.
    shared_points: the splits share their files of points, and a point without a pair belongs to another split.
    labels, features: how many there are where a header says so; None: counted (labels), or there are no features.
    filters: by split, URL of a file of pairs `row label` (0-based lines of the split's only part).
    """

    format: str
    parts: tuple[Part, ...]
    keyed: bool
    filters: Mapping[str, str] = field(default_factory=dict)
    labels: int | None = None
    features: int | None = None
    shared_points: bool = False

    def of(self, table: str) -> tuple[Part, ...]:
        """The parts of `table`, in the order in which their rows are numbered."""
        return tuple(part for part in self.parts if part.table == table)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that have parts."""
        return tuple(split for split in SPLITS if self.of(split))


Text = Literal["title+content", "title"]


@dataclass(frozen=True)
class Context:
    """What a parser may need beside the raw block: options, and the sizes that `Inputs` states."""

    text: Text
    labels: int | None = None
    features: int | None = None


@dataclass(frozen=True)
class Parsed:
    """Normalised columns of the good rows, and the others. `batch` has the columns of `*_schema` below."""

    batch: pa.RecordBatch
    rejects: list[Reject]


class Format(Protocol):
    """One input form; instances are importable, picklable and frozen. `name` is that of `--format`."""

    @property
    def name(self) -> str: ...

    @property
    def expects(self) -> str:
        """One line for messages: the files that make this form."""
        ...

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        """Whether the `names` under `source` look like this form; opens no file unless its name decides nothing."""
        ...

    def find(self, source: str) -> Inputs:
        """The data set at `source`, a prefix or a glob. Raises InputError: files are missing or given twice."""
        ...

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Raw blocks of exactly `block_rows` rows (the last may be shorter): cheap, in the one reader of a part.

        Raises InputError (unusable file), StorageError.
        """
        ...

    def parse_points(self, raw: pa.RecordBatch, first_row: int, part: Part, context: Context) -> Parsed:
        """Points of a raw block that starts at 0-based row `first_row` of its part."""
        ...

    def parse_labels(self, raw: pa.RecordBatch, first_row: int, part: Part, context: Context) -> Parsed:
        """Labels of a raw block. In a form without keys every row has to come out, or the data set is refused."""
        ...

    def parse_pairs(self, raw: pa.RecordBatch, first_row: int, part: Part, context: Context) -> Parsed:
        """Pairs of a raw block; forms without a pairs file never get one."""
        ...


def points_schema(labels: str | None, features: bool) -> pa.Schema:
    """Columns of normalised points.

    row: 0-based row in the part. key: unique within the data set where rows are not duplicates. text: empty where the
    form has none. labels is `label_ids` (>= 0; the upper end is checked later, when the labels are counted) or
    `label_keys`, sorted and unique both, or None: labels come from pairs. merged: labels that the point named again.
    features: feature_ids sorted and unique, feature_values beside them.
    """
    named = {"label_ids": pa.list_(pa.int64()), "label_keys": pa.list_(pa.string()), None: None}[labels]
    of_labels = [] if labels is None else [pa.field(labels, named)]
    own = [pa.field("row", pa.int64()), pa.field("key", pa.string()), pa.field("text", pa.string())]
    return pa.schema([*own, *_features(features), *of_labels, pa.field("merged", pa.int32())])


def labels_schema(features: bool) -> pa.Schema:
    """Columns of normalised labels, as those of points."""
    own = [pa.field("row", pa.int64()), pa.field("key", pa.string()), pa.field("text", pa.string())]
    return pa.schema([*own, *_features(features)])


def pairs_schema() -> pa.Schema:
    """Columns of normalised pairs; pairs of weight <= 0 are left out (that is no reject)."""
    return pa.schema(
        [pa.field("row", pa.int64()), pa.field("query_key", pa.string()), pa.field("label_key", pa.string())]
    )


def list_column(rows: Sequence[Sequence[int]], kind: pa.DataType) -> pa.ListArray:
    """A list column of `kind` from Python rows of integers."""
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.fromiter((value for row in rows for value in row), np.int64, int(offsets[-1]))
    return parquet.list_array(values, offsets, kind)


def _features(present: bool) -> list[pa.Field]:
    kinds = {"feature_ids": pa.list_(pa.int32()), "feature_values": pa.list_(pa.float32())}
    return [pa.field(name, kind) for name, kind in kinds.items()] if present else []
