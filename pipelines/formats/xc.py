"""Formats of the Extreme Classification Repository, in which files are aligned line by line and labels have numbers.

First the formats, then the rows of a part's files, then sizes from headers, then sparse matrices of SciPy.
"""

import ast
import contextlib
import errno
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa

from pipelines.formats import base, from_lines
from pipelines.formats.base import LABELS, SPLITS, Inputs, InvalidRecord, Parsed, Part, RawRows, Reason, Record, Text
from schemas.errors import InputError, StorageError
from schemas.ragged import SparseRows
from schemas.shard_files import parquet
from schemas.storage import join

# Roles of files, in addition to LABELS; BOTH is the old format's file of labels and features.
FEATURES, BOTH, TEXT, JSON = "features", "both", "text", "json"
_MATRICES = (LABELS, FEATURES, BOTH)
_MAX_FEATURES = 1 << 31  # an id is an int32
_MAX_LABELS = 1 << 31
_LABELS_A_POINT = 1000
_MISSING = 1000  # rows that may be missing at the end of a matrix in text, in addition to the number of its other rows
_HEADERS = {"": ("two", "rows columns"), BOTH: ("three", "points features labels")}  # headers of matrices in text

_STEMS = {"train": "trn", "val": "val", "test": "tst", LABELS: "lbl"}
# Possible file names for each role; names in the first group may also end in a codec's suffix.
_OF_LABELS: dict[str, tuple[list[str], list[str]]] = {
    LABELS: ([], []),
    FEATURES: (["lbl_X_Xf.txt", "Yf.txt"], ["lbl_X_Xf.npz"]),
    TEXT: (["Y.txt", "raw/Y.txt", "lbl.raw.txt", "raw_data/label.raw.txt"], []),
    JSON: ([], ["lbl.json.gz", "lbl.raw.json.gz"]),
}
_OF_SPLITS: dict[str, tuple[list[str], list[str]]] = {
    LABELS: (["{stem}_X_Y.txt"], ["{stem}_X_Y.npz", "Y.{stem}.npz"]),
    FEATURES: (["{stem}_X_Xf.txt"], ["{stem}_X_Xf.npz", "X.{stem}.npz"]),
    TEXT: (["{stem}_X.txt", "raw/{stem}_X.txt", "{stem}.raw.txt", "raw_data/{split}.raw.txt", "X.{stem}.txt"], []),
    JSON: ([], ["{stem}.json.gz", "{stem}.raw.json.gz"]),
}


def _targets(record: Record, key: str) -> tuple[list[int], int]:
    """Return the distinct label ids, sorted, and the number of duplicates. Raises InvalidRecord."""
    target = base.numbers(base.required(record, "target_ind"), "target_ind", whole=True)
    if not target:
        raise InvalidRecord(Reason.NO_LABELS, f"the point {base.shown(key)} has no labels (target_ind is empty)")
    ids = sorted(set(target))
    if ids[0] < 0 or ids[-1] >= 1 << 63:
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise InvalidRecord(Reason.LABEL_OUT_OF_RANGE, f"unknown label {base.shown(wrong)}")
    return ids, len(target) - len(ids)


@dataclass(frozen=True)
class Aligned:
    """Format whose parts have files with different `roles`: LABELS and FEATURES (matrices), and TEXT or JSON (lines).

    A matrix is text (first line `rows columns`, then `index:value` fields) or a SciPy .npz file. Every split has a file
    with the `required` role.
    """

    name: str
    expects: str
    roles: tuple[str, ...] = ()
    required: str = ""

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        if self.required == JSON:
            return any(_is_any(names, table, JSON) for table in ("train", LABELS))
        here = [role for role in (FEATURES, TEXT) if _is_any(names, "train", role)]
        return here[:1] == [self.required]  # a source with features is XC_SPARSE

    def find(self, source: str) -> Inputs:
        """Find the data set at `source`, with the sizes given in the headers.

        Raises InputError if a file is missing or duplicated, or if headers disagree.
        """
        source, names = base.list_files(source)
        parts = []
        for table in (*SPLITS, LABELS):
            found = ((role, base.one_of(source, names, _usual(table, role), self.expects)) for role in self.roles)
            files = {role: join(source, file) for role, file in found if file}
            if table != LABELS:
                if not files.keys() & {LABELS, self.required} and table != "train":
                    continue  # texts alone are no split, and files of another format are no split
                needed = [self.required] if JSON in files else [LABELS, self.required]
                for role in [role for role in needed if role in self.roles and role not in files]:
                    base.one_of(source, names, _usual(table, role), f"{self.expects}, for each split", required=True)
            if files:
                first = next(files[role] for role in (LABELS, JSON, TEXT, FEATURES) if role in files)
                parts.append(Part(table, first.rsplit("/", 1)[-1], files))
        return _sized(source, self, parts, names)

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield blocks of exactly `block_rows` rows (the last may be shorter) with the columns of every file of `part`.

        A file of lines yields a column `<role>`; an npz matrix yields `<role>.indices` and `<role>.values`. The
        schema's metadata contains the number of columns that each matrix declares, by role. A part without files has
        only a number of rows. Raises InputError, StorageError.
        """
        if part.rows is not None:
            for first in range(0, part.rows, block_rows):
                yield pa.record_batch({"nothing": pa.nulls(min(block_rows, part.rows - first))})
            return
        rows, columns = _stated(part)
        stated = {role: str(count).encode() for role, count in columns.items()}
        readers = [
            _npz_rows(role, url, block_rows) if url.endswith(".npz") else _lines(role, url, rows, block_rows)
            for role, url in part.files.items()
        ]
        for blocks in zip(*readers, strict=True):
            beside = {name: column for block in blocks for name, column in block.items()}
            yield pa.record_batch(beside).replace_schema_metadata(stated)

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        points = part.table != LABELS
        rows = Rows(raw, first_row, part)
        keys, texts, *labels = rows.records(text)
        if points and LABELS in part.files:
            labels = [*rows.labels(LABELS, rows.matrix(LABELS))]
        features = from_lines.feature_columns(rows.matrix(FEATURES)) if FEATURES in part.files else []
        schema = base.points_schema("label_ids", bool(features)) if points else base.labels_schema(bool(features))
        return rows.parsed([rows.numbers, keys, texts, *features, *labels], schema)


# Records with labels in `target_ind`.
XC_RAW = Aligned(
    name="xc",
    expects="trn.json.gz, lbl.json.gz, and optionally tst.json.gz, val.json.gz (older: trn.raw.json.gz)",
    roles=(JSON,),
    required=JSON,
)
# `trn_X_Y.txt`, `trn_X_Xf.txt`; optionally the same files of `tst` and `val`, `lbl_X_Xf.txt`, and texts: lines
# (`trn_X.txt`) or raw records (`trn.json.gz`), whose `target_ind` gives the labels if `trn_X_Y` is missing.
XC_SPARSE = Aligned(
    name="xc-sparse",
    expects="trn_X_Xf.txt, trn_X_Y.txt, and optionally lbl_X_Xf.txt, tst_X_Xf.txt, tst_X_Y.txt, texts",
    roles=(LABELS, FEATURES, TEXT, JSON),
    required=FEATURES,
)
# `trn_X.txt`, `trn_X_Y.txt`, `Y.txt` (one text per line, one label per line), and optionally the same files of `tst`
# and `val`. Texts may be called `trn.raw.txt`, `lbl.raw.txt`, or `raw_data/train.raw.txt`, `raw_data/label.raw.txt`,
# and may be under `raw/`. The label matrix may be `trn_X_Y.npz` or `Y.trn.npz`.
XC_TEXT = Aligned(
    name="xc-text",
    expects="trn_X.txt (or trn.raw.txt), trn_X_Y.txt (or Y.trn.npz), Y.txt (or lbl.raw.txt), and the same files of tst",
    roles=(LABELS, TEXT),
    required=TEXT,
)


class Rows(RawRows):
    """Rows from the files of a part."""

    def __init__(self, raw: pa.RecordBatch, first_row: int, part: Part) -> None:
        super().__init__(raw, first_row, part.name)
        self._part = part

    def reject_in(self, role: str, rows: int | np.ndarray, reason: Reason, detail: str) -> None:
        """Reject the 0-based `rows` of the block because of an error in the file with the role `role`."""
        self.reject(rows, reason, detail, self._part.files[role].rsplit("/", 1)[-1], self._header(role))

    def _header(self, role: str) -> int:
        """Return the number of header lines in a text matrix; 0 for other files."""
        return int(role in _MATRICES and not self._part.files[role].endswith(".npz"))

    def records(self, text: Text) -> tuple[pa.Array, ...]:
        """Return keys and texts [B] from the JSON records, or from the lines with row numbers as keys (`#17`).

        A record has `title`, and optionally `uid` (default: the row number) and `content`. If the labels of points are
        given only by `target_ind` in the records (line numbers in the labels' file), the result also contains the
        columns label_ids and merged.
        """
        part, count = self._part, self.raw.num_rows
        if JSON not in part.files:
            keys = [f"#{row}" for row in range(self.first_row, self.first_row + count)]
            texts = self.raw[TEXT] if TEXT in part.files else pa.array([b""] * count, pa.large_binary())
            return pa.array(keys, pa.string()), base.decode_column(
                texts, lambda row, byte: self.reject_in(TEXT, row, Reason.NOT_UNICODE, f"byte {byte} is not UTF-8")
            )
        named = part.table != LABELS and LABELS not in part.files

        def read(record: Record, row: int) -> tuple[Any, ...]:
            uid = record.get("uid")
            key = f"#{row}" if uid is None else base.key(uid, "uid")
            body = base.string(base.required(record, "title"), "title")
            if text != "title" and record.get("content") is not None:
                body = base.join_title(body, base.string(record["content"], "content"))
            return (key, body, *_targets(record, key)) if named else (key, body)

        rows, good, rejects = base.parse_lines(self.raw[JSON].to_pylist(), self.first_row, part.name, read)
        for bad in rejects:
            self.reject_in(JSON, bad.line - 1 - self.first_row, bad.reason, bad.detail)
        schema = base.points_schema("label_ids", features=False) if named else base.labels_schema(features=False)
        values: dict[int, tuple[Any, ...]] = dict(zip(rows, good, strict=True))
        absent = (None,) * (len(schema) - 1)
        filled = [values.get(row, absent) for row in range(self.first_row, self.first_row + count)]
        return tuple(pa.array([row[n] for row in filled], kind) for n, kind in enumerate(schema.types[1:]))

    def matrix(self, role: str) -> SparseRows:
        """Read the rows of the matrix in the file with the role `role`. Raises InputError if an index is too large."""
        if f"{role}.indices" in self.raw.schema.names:
            table = pa.Table.from_batches([self.raw])
            ids, values = (parquet.list_column(table, f"{role}.{part}") for part in ("indices", "values"))
            return self.checked(role, role, *from_lines.only_finite(SparseRows(ids.values, values.values, ids.offsets)))
        return self.checked(role, role, *from_lines.parse_sparse_pairs(self.raw[role]))

    def checked(self, kind: str, role: str, ragged: SparseRows, faults: Mapping[int, str]) -> SparseRows:
        """Reject invalid rows of `ragged`, from the file of `role`; check indices against the number of `kind`."""
        for row, detail in faults.items():
            self.reject_in(role, row, Reason.MALFORMED, detail)
        columns = int((self.raw.schema.metadata or {})[kind.encode()])
        beyond = np.flatnonzero(ragged.ids >= columns)
        if len(beyond):
            line = self.first_row + int(ragged.row_of()[beyond[0]]) + self._header(role) + 1
            raise InputError(
                f"{self._part.files[role]}, line {line}: index {ragged.ids[beyond[0]]} is too large: the header "
                f"declares {columns} {kind} (indices start at 0). Fix the line or the header. The header may declare "
                "more than the lines use, but not fewer."
            )
        return ragged

    def labels(self, role: str, ragged: SparseRows) -> tuple[pa.Array, pa.Array]:
        """Return the columns label_ids and merged [B]; a point without labels is rejected."""
        kept, merged = from_lines.merge_labels(ragged)
        none = np.flatnonzero(np.diff(kept.offsets) == 0)
        self.reject_in(role, none, Reason.NO_LABELS, "the point has no labels")
        return parquet.list_array(kept.ids, kept.offsets, pa.int64()), pa.array(merged)


@dataclass(frozen=True)
class XcSingle(Aligned):
    """`train.txt`, and optionally `test.txt` and `val.txt` (a prefix is allowed, as in `eurlex_train.txt`).

    The first line contains the numbers of points, features and labels. A line that starts with a space has no labels.
    Labels have numbers but no texts.
    """

    name: str = "xc-single"
    expects: str = "train.txt with the header `points features labels`, and optionally test.txt, val.txt"

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return bool(_matching("train", names))

    def find(self, source: str) -> Inputs:
        source, names = base.list_files(source)
        parts = list[Part]()
        for split in SPLITS:
            usual = _matching(split, names) or [f"{split}.txt"]
            if name := base.one_of(source, names, usual, self.expects, required=split == "train"):
                parts.append(Part(split, name, {BOTH: join(source, name)}))
        sizes = [_read_header(part.files[BOTH], BOTH) for part in parts]
        features, labels = max(size[1] for size in sizes), max(size[2] for size in sizes)
        _check_features(features, source)
        parts.append(_labels_by_number(labels, sum(size[0] for size in sizes), parts[0].files[BOTH]))
        return Inputs(self.name, tuple(parts), False, base.filters_at(source, names), labels, features)

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        if part.table == LABELS:
            return super().parse(raw, first_row, part, text)
        rows = Rows(raw, first_row, part)
        keys, texts = rows.records(text)
        of_labels, of_features = from_lines.cut_at_space(raw[BOTH])
        features = from_lines.feature_columns(rows.checked(FEATURES, BOTH, *from_lines.parse_sparse_pairs(of_features)))
        labels = rows.labels(BOTH, rows.checked(LABELS, BOTH, *from_lines.parse_indices(of_labels)))
        columns = [rows.numbers, keys, texts, *features, *labels]
        return rows.parsed(columns, base.points_schema("label_ids", True))


def _matching(split: str, names: Sequence[str]) -> list[str]:
    """List the names that match the file of `split`, with or without the data set's name as a prefix."""
    return [name for name in names if re.fullmatch(rf"(?!filter_labels)(.+_)?{split}\.txt{base.CODEC}", name)]


def _usual(table: str, role: str) -> list[str]:
    """List the possible names of the file with the role `role` (LABELS, FEATURES, TEXT, JSON) in `table`."""
    of_text, others = (_OF_LABELS if table == LABELS else _OF_SPLITS)[role]
    return [name.format(stem=_STEMS[table], split=table) for name in (*base.packed(*of_text), *others)]


def _is_any(names: Sequence[str], table: str, role: str) -> bool:
    return any(name in names for name in _usual(table, role))


def _sized(source: str, form: Aligned, parts: list[Part], names: Sequence[str]) -> Inputs:
    """Return the inputs with the numbers of labels and features, read from the headers."""
    of_labels = next((part for part in parts if part.table == LABELS), None)
    matrices = {url: _read_size(url) for part in parts if (url := part.files.get(LABELS))}
    widths = [(_read_size(part.files[FEATURES])[1], part.files[FEATURES]) for part in parts if FEATURES in part.files]
    features, widest = max(widths, default=(None, ""))
    if features is not None:
        _check_features(features, widest)
    labels = max((size[1] for size in matrices.values()), default=None)
    if of_labels is None:
        if labels is None:
            raise base.one_missing(source, names, _usual(LABELS, JSON), form.expects)
        widest = next(url for url, size in matrices.items() if size[1] == labels)
        parts.append(_labels_by_number(labels, sum(size[0] for size in matrices.values()), widest))
    elif FEATURES in of_labels.files:
        rows = _read_size(of_labels.files[FEATURES])[0]
        if labels is not None and labels > rows:
            raise InputError(
                f"{of_labels.files[FEATURES]}: the header declares {rows:,} rows, one for each label, but the label "
                f"matrices have {labels:,} columns. Do the files belong to the same data set?"
            )
        labels = rows
    else:
        labels = None  # each line is a label, so the lines are counted
    return Inputs(form.name, tuple(parts), False, base.filters_at(source, names), labels, features)


def _read_size(url: str) -> tuple[int, int]:
    """Return (rows, columns) of the matrix at `url`, from its header. Raises InputError, StorageError."""
    if url.endswith(".npz"):
        return read_shape(url)
    rows, columns = _read_header(url)
    return rows, columns


def _read_header(url: str, role: str = "") -> list[int]:
    """Read the whole numbers in the first line of a matrix with the role `role`. Raises InputError, StorageError."""
    count, names = _HEADERS[role]
    header = base.first_line(url)
    fields = header.split()
    if len(fields) != len(names.split()) or not all(map(from_lines.INDEX.fullmatch, fields)):
        raise InputError(
            f"{url}, line 1: expected the header `{names}`, {count} whole numbers; got {from_lines.shown_raw(header)}."
        )
    return [int(field) for field in fields]


def _check_features(features: int, url: str) -> None:
    if features > _MAX_FEATURES:
        raise InputError(
            f"{url}: the header declares {features:,} features; expected at most {_MAX_FEATURES:,}. Fix the header."
        )


def _labels_by_number(labels: int, points: int, url: str) -> Part:
    """Make a part of `labels` labels without files, because the header of `url` gives only the number of labels.

    Raises InputError if the number is too large, because all labels would be written.
    """
    limit = min(_MAX_LABELS, _LABELS_A_POINT * (points + _LABELS_A_POINT))
    if labels > limit:
        raise InputError(
            f"{url}: the header declares {labels:,} labels for {points:,} points; without a file of labels, expected "
            f"at most {limit:,}. Fix the header."
        )
    return Part(LABELS, "labels", {}, rows=labels)


def _stated(part: Part) -> tuple[int | None, dict[str, int]]:
    """Return the row count from the headers, or None, and columns by role. Raises InputError if row counts differ."""
    if BOTH in part.files:
        rows, features, labels = _read_header(part.files[BOTH], BOTH)
        return rows, {FEATURES: features, LABELS: labels}
    sizes = {role: _read_size(url) for role, url in part.files.items() if role in _MATRICES}
    if len({size[0] for size in sizes.values()}) > 1:
        stated = " and ".join(f"{part.files[role]} declares {size[0]:,}" for role, size in sizes.items())
        raise InputError(
            f"{stated} rows, but each row of the first file belongs to a row of the second. Do the files belong to the "
            "same data set?"
        )
    return next((size[0] for size in sizes.values()), None), {role: size[1] for role, size in sizes.items()}


def _npz_rows(role: str, url: str, block_rows: int) -> Iterator[dict[str, pa.Array]]:
    for block in read_rows(url, block_rows):
        offsets = pa.array(block.offsets)
        yield {
            f"{role}.indices": pa.LargeListArray.from_arrays(offsets, pa.array(block.ids)),
            f"{role}.values": pa.LargeListArray.from_arrays(offsets, pa.array(block.values)),
        }


def _lines(role: str, url: str, rows: int | None, block_rows: int) -> Iterator[dict[str, pa.Array]]:
    """Yield blocks of exactly `block_rows` lines, up to `rows`. Raises InputError for too few or too many lines.

    A header may declare more rows than a matrix has lines; the missing rows are then empty. However, a file that ends
    within a line, or far before the declared number of rows, is incomplete.
    """
    matrix = role in _MATRICES
    source = base.LineBlocks(url, block_rows, skip=int(matrix))
    held = pa.array([], pa.large_binary())
    read = 0
    for batch in source:
        column = batch["line"]
        if rows is not None and read + len(column) > rows:
            for line, content in enumerate(column.slice(rows - read).to_pylist(), start=1 + matrix + rows):
                if content.strip():
                    raise InputError(
                        f"{url}, line {line}: the header declares {rows:,} rows, but the file continues: "
                        f"{from_lines.shown_raw(content)}. Fix the header. Does the file belong to another split?"
                    )
            column = column.slice(0, rows - read)
        if len(held):
            yield {role: held}
        held = column
        read += len(column)
    missing = 0 if rows is None else rows - read
    if missing and not (matrix and source.ended and missing <= read + _MISSING):
        raise InputError(
            f"{url}: incomplete: {read:,} lines{' after the header' if matrix else ''}, expected {rows:,}, as the "
            f"header {'declares' if matrix else 'of the other matrix declares'}. Copy the file again."
        )
    while missing or len(held):
        blank = min(missing, block_rows - len(held))
        yield {role: pa.concat_arrays([held, pa.array([b""] * blank, pa.large_binary())])}
        missing -= blank
        held = held.slice(len(held))


# Sparse matrices that SciPy's `save_npz` wrote, read block by block as three streams. Nothing is unpickled.

_MEMBERS = ("format", "shape", "indptr", "indices", "data")
_MOST_ENTRIES = 1 << 28  # most entries of a block of rows, because a block is in memory
_SMALL = 1 << 10  # entries of `format` and `shape`; a longer array is invalid
_REMEDY = "Write the matrix with scipy.sparse.save_npz(path, matrix.tocsr())."
_BAD_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, KeyError)


def read_shape(url: str) -> tuple[int, int]:
    """Return (rows, columns) of the matrix at `url`. Raises InputError if there is no CSR matrix; StorageError."""
    with _open(url) as arrays:
        return _shape(url, arrays)


def read_rows(url: str, block_rows: int) -> Iterator[SparseRows]:
    """Yield rows of the matrix at `url`, `block_rows` at a time (fewer at the end), with entries in file order.

    Values outside the range of a 32-bit float become infinite or NaN. Raises InputError, StorageError.
    """
    with _open(url) as arrays:
        rows, columns = _shape(url, arrays)
        indptr, indices, data = (arrays[name] for name in ("indptr", "indices", "data"))
        if indptr.length != rows + 1 or indices.length != data.length:
            raise _damaged(
                url,
                f"indptr, indices and data have {indptr.length:,}, {indices.length:,} and {data.length:,} entries, "
                f"which do not form a matrix of {rows:,} rows",
            )
        start = int(indptr.take(1)[0])
        if start != 0:
            raise _damaged(url, f"indptr starts with {start}, not 0")
        for first in range(0, rows, block_rows):
            ends = indptr.take(min(block_rows, rows - first)).astype(np.int64)
            offsets = np.concatenate([[start], ends])
            if (np.diff(offsets) < 0).any() or offsets[-1] > indices.length:
                raise _damaged(url, f"indptr decreases, or points past the end, from row {first} on")
            count = int(offsets[-1]) - start
            if count > _MOST_ENTRIES:
                raise _damaged(
                    url, f"the rows from {first} on have {count:,} entries; expected at most {_MOST_ENTRIES:,}"
                )
            named = indices.take(count).astype(np.int64)
            with np.errstate(over="ignore", invalid="ignore"):
                values = data.take(count).astype(np.float32)
            wrong = np.flatnonzero((named < 0) | (named >= columns))
            if len(wrong):
                row = first + int(np.searchsorted(offsets - start, wrong[0], "right")) - 1
                raise _damaged(url, f"row {row} has column {named[wrong[0]]}, but there are {columns:,} columns")
            yield SparseRows(named, values, offsets - start)
            start = int(offsets[-1])
        if start != indices.length:
            raise _damaged(url, f"indptr ends with {start:,}, but there are {indices.length:,} entries")
        for array in (indptr, indices, data):
            array.end()


@dataclass
class _Array:
    """One-dimensional array in a stream: `length` entries of `dtype`, read in order."""

    url: str
    name: str
    stream: IO[bytes]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.shape[0] if self.shape else 1

    def take(self, count: int) -> np.ndarray:
        parts = []
        missing = count * self.dtype.itemsize
        while missing:
            with _naming_damage(self.url):
                part = self.stream.read(min(missing, 1 << 24))
            if not part:
                raise _damaged(self.url, f"the array {self.name} is incomplete")
            parts.append(part)
            missing -= len(part)
        return np.frombuffer(b"".join(parts), self.dtype)

    def end(self) -> None:
        """Read to the end of the stream, so that its checksum is verified."""
        with _naming_damage(self.url):
            if self.stream.read(1):
                raise _damaged(self.url, f"the array {self.name} is too long")


@contextlib.contextmanager
def _open(url: str) -> Iterator[dict[str, _Array]]:
    with contextlib.ExitStack() as stack:
        arrays = {}
        for name in _MEMBERS:  # each array opens the file separately, so that the arrays read ahead independently
            file = stack.enter_context(base.open_file(url))
            with _naming_damage(url):
                zipped = stack.enter_context(zipfile.ZipFile(file))
                if f"{name}.npy" not in zipped.namelist():
                    raise InputError(f"{url}: no array {name} in the file: not a CSR matrix of SciPy. {_REMEDY}")
                stream = stack.enter_context(zipped.open(f"{name}.npy"))
                arrays[name] = _Array(url, name, stream, *_header(url, name, stream))
        yield arrays


def _shape(url: str, arrays: dict[str, _Array]) -> tuple[int, int]:
    kind, shape = arrays["format"], arrays["shape"]
    if kind.dtype.kind not in "SU" or kind.length != 1 or kind.dtype.itemsize > _SMALL:
        raise InputError(f"{url}: the array format is not a string: not a CSR matrix of SciPy. {_REMEDY}")
    name = kind.take(1)[0]
    name = name.decode("ascii", "replace") if isinstance(name, bytes) else str(name)
    if name != "csr":
        raise InputError(f"{url}: a matrix in {name[:20]!r} order; expected 'csr'. {_REMEDY}")
    for array, kinds in (("shape", "iu"), ("indptr", "iu"), ("indices", "iu"), ("data", "biuf")):
        if arrays[array].dtype.kind not in kinds or len(arrays[array].shape) != 1:
            raise InputError(
                f"{url}: the array {array} has the type {arrays[array].dtype}, so this is not a CSR matrix. {_REMEDY}"
            )
    if shape.length != 2:
        raise InputError(f"{url}: the shape has {shape.length} numbers; expected rows and columns. {_REMEDY}")
    rows, columns = (int(size) for size in shape.take(2))
    if rows < 0 or columns < 0:
        raise InputError(f"{url}: unusable shape {rows} × {columns}. {_REMEDY}")
    return rows, columns


def read_header(stream: IO[bytes], most: int = 10_000) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Read (dtype, shape, whether in column-major order) from a `.npy` stream with a header of at most `most` bytes.

    Raises ValueError with a message that continues a sentence starting with the array's name.
    """
    magic = stream.read(8)
    width = {b"\x93NUMPY\x01": 2, b"\x93NUMPY\x02": 4, b"\x93NUMPY\x03": 4}.get(magic[:7], 0)
    size = int.from_bytes(stream.read(width), "little")
    if not width or size > most:
        raise ValueError("has no header")
    try:
        header = ast.literal_eval(stream.read(size).decode("utf-8"))
        dtype, shape, by_column = np.dtype(header["descr"]), header["shape"], header["fortran_order"]
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        raise ValueError("has a header that cannot be read") from None
    if not (isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)):
        raise ValueError(f"has the shape {shape!r:.60}")
    return dtype, shape, bool(by_column)


def _header(url: str, name: str, stream: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    try:
        dtype, shape, by_column = read_header(stream, _SMALL)
    except ValueError as error:
        raise _damaged(url, f"the array {name} {error}") from None
    if dtype.kind not in "SUbiuf" or not dtype.itemsize or (by_column and len(shape) > 1):
        raise InputError(f"{url}: the array {name} does not contain plain numbers (pickled?). {_REMEDY}")
    return dtype, shape


@contextlib.contextmanager
def _naming_damage(url: str) -> Iterator[None]:
    try:
        yield
    except _BAD_ZIP as error:
        raise _damaged(url, str(error).rstrip(".") or "the file is incomplete") from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # a position before the start of the file
            raise _damaged(url, "the directory of the archive is damaged") from None
        raise StorageError(f"could not read {url}: {error}; run the same command again.") from error


def _damaged(url: str, fault: str) -> InputError:
    return InputError(
        f"{url}: not a NumPy .npz file, or damaged: {fault}. Copy the file again, or write a new file. {_REMEDY}"
    )


XC_SINGLE = XcSingle()
