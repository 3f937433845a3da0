"""Points and pairs from columns: how files of columns are read, and then the rows in them."""

import codecs
import contextlib
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.formats import base, from_lines
from pipelines.formats.base import Fields, Parsed, Part, RawRows, Reason, Text
from schemas import storage
from schemas.errors import InputError
from schemas.ragged import SparseRows, offsets_of
from schemas.table import rechunk

PARQUET = "parquet"
ARROW = "arrow"
CSV = rf"(?:csv|tsv){base.CODEC}"
COUNT = "\x01fields"  # column with the number of fields of each row
_MOST_TEXT = (1 << 31) - 1  # bytes in a column of one batch
SEPARATORS, NO_SEPARATOR = "\t;|,", "\x1f"  # of a .csv; a .tsv has tabs

csv.field_size_limit(base.MAX_LINE_BYTES)


def column_names(url: str, encoding: str | None = None) -> list[str] | None:
    """Return the column names of a file, or None if its extension does not belong to a format with columns.

    Raises InputError if the content does not match the extension or a header contains a column twice; StorageError.
    """
    if url.endswith(f".{PARQUET}"):
        with open_parquet(url) as file:
            return list(file.schema_arrow.names)
    if url.endswith(f".{ARROW}"):
        with _open_arrow(url) as stream:
            return list(stream.schema.names)
    return _header(url, chain.from_iterable(_records(url, 1, encoding))) if is_csv(url) else None


def read_arrow(url: str, block_rows: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield blocks of `block_rows` rows (the last may be shorter) with the columns in `columns` that the file contains.

    Class labels are returned as their names, and -1 as null. Raises InputError if the file is damaged or not an Arrow
    stream; StorageError.
    """
    with _open_arrow(url) as stream:
        present = [name for name in columns if name in stream.schema.names]
        yield from _in_blocks((batch.select(present) for batch in stream), stream.schema, block_rows)


def _in_blocks(batches: Iterable[pa.RecordBatch], schema: pa.Schema, block_rows: int) -> Iterator[pa.RecordBatch]:
    """Regroup the rows into batches of exactly `block_rows` rows (the last may be shorter), with names of classes."""
    classes = _class_names(schema)

    def named() -> Iterator[pa.Table]:
        for batch in batches:
            for name in classes.keys() & {*batch.schema.names}:
                column, names = batch[name], pa.array(classes[name], pa.string())
                offsets, numbers = list_entries(column) if is_list(column.type) else (None, column)
                if pa.types.is_integer(numbers.type):
                    labels = names.take(pc.if_else(pc.equal(numbers, -1), None, numbers))
                    labels = labels if offsets is None else pa.LargeListArray.from_arrays(pa.array(offsets), labels)
                    batch = batch.set_column(batch.schema.get_field_index(name), name, labels)
            yield pa.Table.from_batches([batch])

    for table in rechunk(named(), block_rows):
        yield from table.to_batches()


def _class_names(schema: pa.Schema) -> dict[str, list[str]]:
    named = {}
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        for column, feature in features.items():
            inner = feature.get("feature", feature) if isinstance(feature, dict) else feature[0]
            if isinstance(inner, dict) and isinstance(inner.get("names"), list):
                named[column] = inner["names"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        pass
    return named


def is_list(kind: pa.DataType) -> bool:
    """Return whether a type is a list: also a large list, a list of fixed size, or a view."""
    return hasattr(kind, "value_field")


def list_entries(column: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Return (offsets int64 [B + 1], entries) of a column of lists of any kind; null is an empty list."""
    return offsets_of(pc.list_value_length(column).fill_null(0).to_numpy()), column.flatten()


@contextlib.contextmanager
def _open_arrow(url: str) -> Iterator[pa.RecordBatchStreamReader]:
    """Open an Arrow stream. Raises InputError, also within the block, if the stream is damaged; StorageError."""
    with base.open_file(url) as file:
        try:
            file.seek(8 if file.read(6) == b"ARROW1" else 0)  # a file with a footer contains a stream
            with pa.ipc.open_stream(pa.PythonFile(file, mode="r")) as stream:
                check_names(url, stream.schema.names)
                yield stream
        except (pa.ArrowException, OSError) as error:
            fault = f"not an Arrow stream, or damaged: {str(error)[:200]}"
            raise InputError(f"{url}: {fault}. Save the data set again.") from None


def read_parquet(url: str, block_rows: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield blocks of exactly `block_rows` rows (the last may be shorter) with the columns in `columns` that exist.

    Raises InputError if the file is damaged or not Parquet; StorageError.
    """
    rows = min(block_rows, 1 << 16)
    with open_parquet(url) as file:
        present = [name for name in columns if name in file.schema_arrow.names]
        # Row groups are read one at a time: Arrow cannot join dictionaries within lists.
        groups = (file.iter_batches(rows, [n], present, use_threads=False) for n in range(file.num_row_groups))
        try:
            yield from _in_blocks(chain.from_iterable(groups), file.schema_arrow, block_rows)
        except MemoryError:  # also Arrow's own error
            raise too_large(url, rows) from None


@contextlib.contextmanager
def open_parquet(url: str, buffer_size: int = 0) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. With a `buffer_size`, column chunks are read in parts and are never loaded as a whole.

    Raises InputError, also within the block, if the file is missing or damaged, or names a column twice; StorageError.
    """
    try:
        source = storage.RangeReader(url, storage.size(url))
        options = {"pre_buffer": not buffer_size, "buffer_size": buffer_size}
        with pq.ParquetFile(source, **options) as file:
            check_names(url, file.schema_arrow.names)
            if not any(pa.types.is_fixed_size_list(field.type) for field in file.schema_arrow):
                yield file
                return
            # Arrow cannot read null in a list that its own schema calls fixed-size. Without that schema, it can.
            footer = io.BytesIO()
            file.metadata.write_metadata_file(footer)
        footer = pa.BufferReader(footer.getvalue().replace(b"ARROW:schema", b"other:schema"))
        with pq.ParquetFile(source, metadata=pq.read_metadata(footer), **options) as file:
            yield file
    except FileNotFoundError:
        raise InputError(f"{url}: file not found.") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")[:200]
        if "list" in reason:
            remedy = "Write a null list as an empty list, or copy a damaged file again."
            raise InputError(f"{url}: Arrow cannot read these lists: {reason}. {remedy}") from None
        raise InputError(f"{url}: not a Parquet file, or damaged: {reason}. Copy the file again.") from None


def check_names(place: str, names: Sequence[str]) -> None:
    """Raise InputError if two columns have one name."""
    for name, count in Counter(names).items():
        if count > 1:
            found = f"{base.shown(name)}; found: {', '.join(names)[:200]}"
            raise InputError(f"{place}: two columns are called {found}. Rename one of the two columns.")


def too_large(url: str, rows: int) -> InputError:
    return InputError(
        f"{url}: a batch of {rows:,} rows does not fit into memory: its values are much larger after decompression. "
        "Write the file with shorter values, or give more memory."
    )


def is_csv(url: str) -> bool:
    """Return whether the file has the extension of a CSV or TSV file."""
    return re.search(rf"\.{CSV}$", url) is not None


def read_csv(url: str, block_rows: int, encoding: str | None = None) -> Iterator[pa.RecordBatch]:
    """Yield blocks of `block_rows` rows (the last may be shorter) with the file's columns as strings, and COUNT.

    COUNT is 0 for an empty line, and for a row of several empty cells. Raises InputError if the file is incomplete or
    not CSV in its encoding; StorageError.
    """
    records = chain.from_iterable(_records(url, block_rows, encoding))
    names = _header(url, records)
    records = chain([()], records)  # the header counts as an empty row, so that row numbers agree with lines
    while rows := [*islice(records, block_rows)]:
        counts = [len(row) if len(row) < 2 or any(row) else 0 for row in rows]  # ";;" is an empty row of a spreadsheet
        columns = [[row[place] if place < len(row) else None for row in rows] for place in range(len(names))]
        arrays = [_without_apostrophes(pa.array(column, pa.string()), url) for column in columns]
        yield pa.record_batch([*arrays, pa.array(counts, pa.int32())], names=[*names, COUNT])


def _header(url: str, records: Iterator[Sequence[str]]) -> list[str]:
    names = _without_apostrophes(pa.array([name.strip() for name in next(records, [])], pa.string()), url).to_pylist()
    check_names(url, names)
    return names


# Before a formula (but not a number such as -5), an apostrophe shows spreadsheets that the cell is text.
FORMULA = re.compile(r"\A'('*(?:[=+@\t\r\n]|-(?!\d+(?:[.,]\d+)*\Z)))")


def _without_apostrophes(column: pa.StringArray, url: str) -> pa.StringArray:
    if not re.search(rf"\.csv{base.CODEC}$", url) or not pc.any(pc.starts_with(column, "'")).as_py():
        return column
    return pa.array([text and FORMULA.sub(r"\1", text) for text in column.to_pylist()], pa.string())


def _records(url: str, block_rows: int, encoding: str | None) -> Iterator[list[Sequence[str]]]:
    """Yield some rows at a time. Empty rows follow a row of several lines, so that row numbers agree with lines."""
    line = 0
    try:
        reader = open_csv(url, encoding)
        while rows := list(islice(reader, block_rows)):
            if reader.line_num - line > len(rows):
                rows = [each for row in rows for each in (row, *[()] * _line_breaks(",".join(row)))]
            line = reader.line_num
            yield rows
    except csv.Error as error:
        with contextlib.suppress(csv.Error):  # find the row: read the file again
            reader, line = open_csv(url, encoding), 0
            for _ in reader:
                line = reader.line_num
        raise InputError(
            f"{url}, line {line + 1:,}: not CSV: {error}. Check that all quotes are closed in the row that starts here."
        ) from None


def open_csv(url: str, encoding: str | None) -> Any:
    lines = _text_lines(url, encoding)
    head = [*islice(lines, _HEAD)]
    if re.search(rf"\.tsv{base.CODEC}$", url):
        return csv.reader(chain(head, lines), delimiter="\t", quoting=csv.QUOTE_NONE)
    return csv.reader(chain(head, lines), delimiter=separator(head), strict=True)


_HEAD = 100  # first lines, which show the separator


def separator(lines: Sequence[str]) -> str:
    """Return the separator of a CSV with these first lines: most rows then have as many fields as the header.

    If several marks fit, it is the one with most fields, and rather not a comma. No mark in the header: one column.
    """

    def fit(mark: str) -> tuple[float, int]:
        rows = [row for row in csv.reader(lines, delimiter=mark) if row]
        same = [len(row) == len(rows[0]) for row in rows[1 : -1 if len(lines) == _HEAD else None]]  # a cut last row
        return (sum(same) / len(same) if same else 1.0), len(rows[0])

    fits = {mark: fit(mark) for mark in SEPARATORS} if any(map(str.strip, lines)) else {}
    return max((mark for mark in fits if fits[mark][1] > 1), key=lambda mark: fits[mark], default=NO_SEPARATOR)


def _line_breaks(text: str) -> int:
    return text.count("\n") + (text.count("\r") - text.count("\r\n") if "\r" in text else 0)


def _text_lines(url: str, encoding: str | None) -> Iterator[str]:
    """Yield the lines of a file of text with their line endings, including a lone CR, without a byte order mark."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=False)
    pending, line = "", 1
    for chunk in chain(base.read_text(url, encoding), [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            line += _line_breaks(pending + error.object[: error.start].decode())
            near = error.object[max(error.start - 30, 0) : error.start + 30].splitlines()
            fault = base.not_utf8(next(words for words in near if not words.isascii()))
            raise InputError(f"{url}, line {line:,}: {fault}.") from None
        *whole, pending = io.StringIO(pending + text, newline="").readlines() or [""]
        yield from whole
        line += len(whole)
        if len(pending) > base.MAX_LINE_BYTES:
            raise csv.Error(f"a line of more than {base.MAX_LINE_BYTES:,} characters")
    yield pending


def parse_points(raw: pa.RecordBatch, first_row: int, part: Part, fields: Fields, text: Text) -> Parsed:
    """Parse a raw block of `part` into points, or into labels like points without labels."""
    rows, contents = _Rows(raw, first_row, part.name), part.contents
    texts = rows.text(fields, text, contents.need_text)
    if contents.keys:
        key = rows.key(fields.key, trim=part.lists_labels)
    else:
        key = pa.array(map(base.text_key, texts.to_pylist()), pa.string())
    columns = [rows.numbers, key, texts]
    if contents.features:
        columns += rows.features(fields)
    if contents.dense:
        columns.append(rows.vector(fields.vector, contents.dense))
    if contents.labels:
        columns += rows.label(fields.label) if contents.single else rows.labels(fields.labels)
    else:
        columns.append(pa.array(np.zeros(len(texts), np.int32)))
    schema = base.points_schema("label_keys" if contents.labels else None, contents.features, contents.dense)
    return rows.parsed(columns, schema)


def parse_pairs(raw: pa.RecordBatch, first_row: int, file: str, fields: Fields) -> Parsed:
    """Parse a raw block into pairs; pairs with a weight of 0 or less are left out."""
    rows = _Rows(raw, first_row, file)
    columns = [rows.numbers, rows.key(fields.query_key), rows.key(fields.label_key, trim=True)]
    if fields.weight not in raw.schema.names:
        return rows.parsed(columns, base.pairs_schema())
    relevant = rows.is_positive(fields.weight)
    parsed = rows.parsed(columns, base.pairs_schema())
    kept = parsed.batch.filter(pa.array(relevant).filter(rows.good(np.arange(len(relevant)))))
    return replace(parsed, batch=kept, left_out=parsed.batch.num_rows - kept.num_rows)


class _Rows(RawRows):
    """Rows of one file. A CSV row with more or fewer fields than the header is rejected; an empty row is skipped."""

    def __init__(self, raw: pa.RecordBatch, first_row: int, file: str) -> None:
        super().__init__(raw, first_row, file)
        if COUNT in raw.schema.names:
            present = pc.greater(raw[COUNT], 0)
            self.raw, self.numbers = raw.filter(present), self.numbers.filter(present)
            counts, width = self.raw[COUNT].to_numpy(), raw.num_columns - 1
            for row in np.flatnonzero(counts != width).tolist():
                self.reject(row, Reason.MALFORMED, f"expected {width} fields, as in the header, got {counts[row]}")

    def key(self, name: str, trim: bool = False) -> pa.Array:
        """Return a column of keys: non-empty strings, or whole numbers as their digits. trim: without outer blanks."""
        column = self._strings(name, "a string or a whole number", numbers=True)
        column = pc.utf8_trim_whitespace(column) if trim else column
        self._reject(pc.equal(column, ""), Reason.MALFORMED, f"{name} contains an empty key")
        return column

    def text(self, fields: Fields, parts: Text, is_required: bool) -> pa.Array:
        """Return the title, a newline and the text, or the content if there is no text; each part may be missing."""
        absent = pa.array(np.zeros(self.raw.num_rows, bool)), pa.array([""] * self.raw.num_rows, pa.string())
        (has_title, title), (has_body, body), (has_content, content) = (
            (self.raw[name].is_valid(), self._strings(name, "a string", nulls=True))
            if name in self.raw.schema.names
            else absent
            for name in fields.texts
        )
        if is_required:
            missing = pc.invert(pc.or_(has_title, pc.or_(has_body, has_content)))
            self._reject(missing, Reason.MISSING_FIELD, f"{fields.body} is null")
        rest = pc.if_else(has_body, body, content)
        if parts == "title":
            return pc.if_else(has_title, title, rest)
        gap = pc.if_else(pc.and_(pc.not_equal(title, ""), pc.not_equal(rest, "")), "\n", "")
        return pc.binary_join_element_wise(title, gap, rest, "")

    def label(self, name: str) -> tuple[pa.Array, pa.Array]:
        """Return the columns label_keys and merged for rows with one label each."""
        offsets = pa.array(np.arange(self.raw.num_rows + 1, dtype=np.int32))
        merged = pa.array(np.zeros(self.raw.num_rows, np.int32))
        column = self.raw[name]
        is_text = pa.types.is_string(column.type)
        none = pc.equal(pc.utf8_trim_whitespace(column), "").fill_null(True) if is_text else column.is_null()
        self._reject(none, Reason.NO_LABELS, f"the point has no label ({name} is empty, null or -1)")
        return pa.ListArray.from_arrays(offsets, self.key(name, trim=True)), merged

    def labels(self, name: str) -> tuple[pa.Array, pa.Array]:
        """Return the columns label_keys and merged. A null is no label."""
        if is_list(self.raw[name].type):
            offsets, flat = list_entries(self.raw[name])
        else:
            cells = self._strings(name, "a list of label keys, or text", numbers=True, nulls=True)
            offsets, flat = from_lines.split_cells(cells, name, self.reject)
        named = flat.is_valid()
        offsets = offsets_of(named.to_numpy(zero_copy_only=False))[offsets]
        if flat.type == pa.string_view():
            flat = flat.cast(pa.string(), safe=False)  # Arrow cannot filter views
        inner = _Rows(pa.record_batch({name: flat.filter(named)}), 0, self.file)
        keys = inner.key(name, trim=True)
        owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        for reject in inner.rejects:
            self.reject(int(owner[reject.line - 1]), reject.reason, reject.detail)
        none = np.flatnonzero(np.diff(offsets) == 0)
        self.reject(none, Reason.NO_LABELS, f"the point has no labels ({name} is empty)")
        return from_lines.unite_keys(keys, offsets)

    def features(self, fields: Fields) -> list[pa.Array]:
        """Return the columns feature_ids and feature_values; a row without features is empty."""
        if fields.feature_ids not in self.raw.schema.names:
            none = pa.array([[]] * self.raw.num_rows)
            return [none.cast(pa.list_(pa.int32())), none.cast(pa.list_(pa.float32()))]
        offsets, ids = self._list(fields.feature_ids, "a list of whole numbers")
        counts = np.diff(offsets)
        owner = np.repeat(np.arange(len(counts)), counts)
        number = self._numbers(ids, fields.feature_ids, whole=True)
        values = np.ones(len(number), np.float64)
        if fields.feature_values in self.raw.schema.names:
            beside, flat = self._list(fields.feature_values, "a list of numbers")
            entries = self._numbers(flat, fields.feature_values, whole=False)
            same = np.diff(beside) == counts
            detail = f"{fields.feature_ids} and {fields.feature_values} have different lengths"
            self.reject(np.flatnonzero(~same), Reason.MALFORMED, detail)
            places = np.repeat(beside[:-1] - offsets[:-1], counts) + np.arange(len(number))
            values = np.where(same[owner], np.append(entries, 0.0)[np.minimum(places, len(entries))], 0.0)
        wrong = ~(np.abs(values) <= from_lines.LARGEST)
        detail = f"{fields.feature_values} contains a value that a 32-bit float cannot hold"
        self.reject(owner[wrong], Reason.MALFORMED, detail)
        beyond = ~((number >= 0) & (number < 1 << 31))
        self.reject(owner[beyond], Reason.FEATURE_OUT_OF_RANGE, f"{fields.feature_ids} must be in [0, 2^31)")
        good = ~(wrong | beyond)
        safe = np.where(good, number, 0).astype(np.int64), np.where(good, values, 0).astype(np.float32)
        return from_lines.feature_columns(SparseRows(*safe, offsets))

    def vector(self, name: str, dense: int) -> pa.Array:
        """Return the column of vectors [dense], one vector per row."""
        vectors, counts = np.zeros((self.raw.num_rows, dense), np.float64), np.zeros(self.raw.num_rows, np.int64)
        missing = pa.array(np.ones(self.raw.num_rows, bool))
        if name in self.raw.schema.names:
            missing = self.raw[name].is_null()
            offsets, flat = self._list(name, "a list of numbers")
            counts = np.diff(offsets)
            entries = self._numbers(flat, name, whole=False)
            vectors[counts == dense] = entries[np.repeat(counts == dense, counts)].reshape(-1, dense)
        self._reject(missing, Reason.MISSING_FIELD, f"{name} is missing or null")
        for row in np.flatnonzero(counts != dense).tolist():
            self.reject(row, Reason.MALFORMED, from_lines.WRONG_LENGTH.format(name, counts[row], dense))
        beyond = ~(np.abs(vectors) <= from_lines.MOST_FLOAT16).all(axis=1)
        self.reject(np.flatnonzero(beyond), Reason.MALFORMED, from_lines.NOT_FLOAT16.format(name))
        return from_lines.vector_column(vectors)

    def is_positive(self, name: str) -> np.ndarray:
        """Return whether each number in a column is above 0, bool [B]."""
        column = self.raw[name]
        if COUNT in self.raw.schema.names:  # CSV: all columns are text
            values = from_lines.parse_numbers(column.fill_null("").cast(pa.large_binary()))
        else:
            values = self._numbers(column, name, whole=False)
        self.reject(np.flatnonzero(np.isnan(values)), Reason.WRONG_TYPE, f"{name} must be a number")
        return values > 0

    def _strings(self, name: str, expected: str, numbers: bool = False, nulls: bool = False) -> pa.Array:
        column = self.raw[name]
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        string = pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view()
        if not (string or pa.types.is_null(kind) or (numbers and pa.types.is_integer(kind))):
            raise InputError(f"{self.file}: the column {name!r} is of type {column.type}; expected {expected}.")
        if not nulls:
            self._reject(column.is_null(), Reason.MISSING_FIELD, f"{name} is null")
        if pa.types.is_dictionary(column.type):
            if string:
                lengths = pc.binary_length(column.dictionary.cast(pa.large_string())).take(column.indices)
                if (pc.sum(lengths).as_py() or 0) > _MOST_TEXT:
                    raise too_large(self.file, len(column))
            column = column.dictionary_decode()
        content = column.cast(pa.string(), safe=False).fill_null("").cast(pa.binary())
        return base.decode_column(
            content, lambda row, byte: self.reject(row, Reason.NOT_UNICODE, f"byte {byte} of {name} is not UTF-8")
        )

    def _list(self, name: str, expected: str) -> tuple[np.ndarray, pa.Array]:
        """Return (offsets int64 [B + 1], entries) of a column of lists; null is an empty list."""
        column = self.raw[name]
        column = column.cast(pa.list_(pa.null())) if pa.types.is_null(column.type) else column
        if not is_list(column.type):
            raise InputError(f"{self.file}: the column {name!r} is of type {column.type}; expected {expected}.")
        return list_entries(column)

    def _numbers(self, column: pa.Array, name: str, whole: bool) -> np.ndarray:
        """Return whole numbers as int64, other numbers as float64; null becomes -1 or NaN."""
        integer = pa.types.is_integer(column.type) or pa.types.is_null(column.type)
        if not (integer or (not whole and pa.types.is_floating(column.type))):
            kind = "whole numbers" if whole else "numbers"
            raise InputError(f"{self.file}: the column {name!r} contains {column.type}; expected {kind}.")
        if not whole:
            return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return column.cast(pa.int64(), safe=False).fill_null(-1).to_numpy()

    def _reject(self, mask: pa.Array, reason: Reason, detail: str) -> None:
        self.reject(np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False)), reason, detail)
