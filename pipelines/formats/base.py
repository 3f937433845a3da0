"""Interface of all input formats: find files, read raw blocks of rows, and parse them into normalised columns.

A parser never raises an error for an invalid row: the row becomes a Reject. A parser raises InputError only if a file
is unusable. The order of rejects does not depend on the workers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import pyarrow as pa

from pipelines.options import Text as Text
from schemas import arrow


class Reason(str, Enum):
    """Reason for rejecting a row; the value is the reason's name in the rejects table and in a manifest's counters."""

    NOT_JSON = "not_json"
    NOT_OBJECT = "not_an_object"
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    NOT_UNICODE = "not_unicode"
    MALFORMED = "malformed"  # a text line that does not match its format
    LABEL_OUT_OF_RANGE = "label_out_of_range"
    FEATURE_OUT_OF_RANGE = "feature_out_of_range"
    NO_LABELS = "no_labels"
    DUPLICATE_KEY = "duplicate_key"  # another row has the same key and different content
    UNKNOWN_LABEL = "unknown_label"  # one mention of a label that does not exist
    UNKNOWN_QUERY = "unknown_query"


@dataclass(frozen=True, order=True)
class Reject:
    """One rejected row: file, line (from 1), reason, and detail."""

    file: str
    line: int
    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {printable(self.detail)}"


def printable(text: str) -> str:
    """Return `text` with control characters and other invisible characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def rejects_batch(rejects: Sequence[Reject]) -> pa.RecordBatch:
    """Return the rejects as rows of the rejects table."""
    columns = [[r.file for r in rejects], [r.line for r in rejects], [r.reason.value for r in rejects]]
    return pa.record_batch([*columns, [r.detail for r in rejects]], schema=arrow.rejects())


SPLITS = ("train", "val", "test")
LABELS = "labels"
PAIRS = "pairs/"  # a table `pairs/train` contains (query_key, label_key) of the split `train`


@dataclass(frozen=True)
class RowContents:
    """What the rows of a part with string keys contain.

    keys: rows contain keys; otherwise, the key of a row is a hash of its text. labels: rows contain labels; otherwise,
    a file of pairs contains the labels. single: each row names one label. derived: the part contains labels that are
    extracted from the points. dense: length of a row's vector; 0: no vector.
    """

    features: bool = False
    keys: bool = True
    labels: bool = True
    single: bool = False
    derived: bool = False
    dense: int = 0


@dataclass(frozen=True)
class Part:
    """Files that are read together, line by line; `files` maps each role to a URL.

    A table (a split, `labels`, `pairs/<split>`) may have many parts. `name` is shown in messages and rejects. For a
    part without files, `rows` is the number of rows given in a header.
    """

    table: str
    name: str
    files: Mapping[str, str]
    rows: int | None = None
    contents: RowContents = RowContents()


@dataclass(frozen=True)
class Inputs:
    """Files of one data set at a source.

    keyed: labels have string keys, and the pipeline assigns ids; otherwise, a label's id is its 0-based line number, as
    in XC. shared_points: the splits share files of points, and a point without a pair in one split belongs to another
    split. labels, features: the numbers of labels and features given in a header; None if the labels have to be
    counted, or if there are no features. filters: for each split, the URL of a file of pairs `row label`, in which row
    is a 0-based line of the split's only part.
    """

    format: str
    parts: tuple[Part, ...]
    keyed: bool
    filters: Mapping[str, str] = field(default_factory=dict)
    labels: int | None = None
    features: int | None = None
    shared_points: bool = False

    def parts_of(self, table: str) -> tuple[Part, ...]:
        """Return the parts of `table`, in the order in which their rows are numbered."""
        return tuple(part for part in self.parts if part.table == table)

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits that have parts."""
        return tuple(split for split in SPLITS if self.parts_of(split))


@dataclass(frozen=True)
class Parsed:
    """Valid rows with the columns of a `*_schema` below, rejects, and the number of pairs ignored because of weight."""

    batch: pa.RecordBatch
    rejects: list[Reject]
    left_out: int = 0


class RawRows:
    """Rows of a raw block that is being parsed into columns. For each rejected row, the first reason is recorded."""

    def __init__(self, raw: pa.RecordBatch, first_row: int, file: str) -> None:
        self.raw, self.first_row, self.file = raw, first_row, file
        self.numbers = pa.array(np.arange(first_row, first_row + raw.num_rows))
        self._left_out: dict[int, Reject] = {}

    @property
    def rejects(self) -> list[Reject]:
        """Rejects, in row order."""
        return [reject for _, reject in sorted(self._left_out.items())]

    def reject(self, row: int, reason: Reason, detail: str, file: str = "", header: int = 0) -> None:
        """Reject the 0-based `row` of the block because of `file`, which starts with `header` header lines."""
        line = self.numbers[row].as_py() + header + 1
        self._left_out.setdefault(row, Reject(file or self.file, line, reason, detail))

    def good(self, rows: np.ndarray) -> pa.BooleanArray:
        """Mark the accepted rows among `rows`."""
        return pa.array(~np.isin(rows, list(self._left_out)))

    def parsed(self, columns: Sequence[pa.Array], schema: pa.Schema) -> Parsed:
        """Return the columns of all accepted rows, and the rejects."""
        batch = pa.record_batch(list(columns), schema=schema)
        if self._left_out:
            batch = batch.filter(self.good(np.arange(self.raw.num_rows)))
        return Parsed(batch, self.rejects)


class Format(Protocol):
    """One input format; instances are importable, picklable and frozen."""

    @property
    def name(self) -> str:
        """Name of the format, as in `--format`."""

    @property
    def expects(self) -> str:
        """Text for messages that lists the files that this format expects."""

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        """Return whether the `names` under `source` match this format; opens a file only if the names are ambiguous."""

    def find(self, source: str) -> Inputs:
        """Find the data set at `source`, a prefix or a glob. Raises InputError if files are missing or duplicated."""

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield raw blocks of exactly `block_rows` rows (the last may be shorter).

        Reading must be cheap, because a single worker reads a part. Raises InputError if a file is unusable;
        StorageError.
        """

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        """Parse a raw block that starts at 0-based row `first_row` of its part into points, labels or pairs.

        If a format has no keys, it has no pairs, and an invalid label makes the whole data set unusable.
        """


def points_schema(labels: str | None, features: bool, dense: int = 0) -> pa.Schema:
    """Return the columns of normalised points.

    row: 0-based row in the part. key: unique within the data set, except for duplicate rows. text: empty if the format
    has no texts. labels: `label_ids` or `label_keys`, both sorted and unique; None: labels come from pairs. Ids are >=
    0; the upper bound is checked later, when the labels are counted. merged: number of duplicate labels that were
    removed from the point. features: feature_ids sorted and unique, with feature_values. dense: length of the vectors,
    or 0.
    """
    named = {"label_ids": pa.list_(pa.int64()), "label_keys": pa.list_(pa.string()), None: None}[labels]
    of_labels = [] if labels is None else [pa.field(labels, named)]
    return pa.schema([*labels_schema(features, dense), *of_labels, pa.field("merged", pa.int32())])


def labels_schema(features: bool, dense: int = 0) -> pa.Schema:
    """Return the columns of normalised labels, with the same meanings as in `points_schema`."""
    kinds = {"row": pa.int64(), "key": pa.string(), "text": pa.string()}
    if features:
        kinds |= {"feature_ids": pa.list_(pa.int32()), "feature_values": pa.list_(pa.float32())}
    if dense:
        kinds["dense"] = arrow.dense_type(dense)
    return pa.schema(list(kinds.items()))


def pairs_schema() -> pa.Schema:
    """Return the columns of normalised pairs; pairs with weight <= 0 are ignored without being rejected."""
    return pa.schema([("row", pa.int64()), ("query_key", pa.string()), ("label_key", pa.string())])


def decode_column(column: pa.Array, note: Callable[[int, int], None]) -> pa.StringArray:
    """Return a binary column without nulls as text; values that are not UTF-8 become "" and call `note(row, byte)`."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        texts = []
        for row, value in enumerate(column.to_pylist()):
            try:
                texts.append(value.decode("utf-8"))
            except UnicodeDecodeError as error:
                texts.append("")
                note(row, error.start)
        return pa.array(texts, pa.string())
