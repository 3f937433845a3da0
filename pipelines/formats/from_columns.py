"""Parse points, labels and pairs from columns: check and normalise them without a loop over rows."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats.base import Parsed, RawRows, Reason, decode_column, pairs_schema, points_schema
from pipelines.formats.cells import split_cells
from pipelines.formats.column_files import COUNT, is_list, list_entries, too_large
from pipelines.formats.from_lines import parse_numbers
from pipelines.formats.names import Fields, Shape, text_key
from pipelines.formats.sparse import MOST_FLOAT16, NOT_FLOAT16, WRONG_LENGTH, feature_columns, unite_keys, vector_column
from schemas.errors import InputError
from schemas.ragged import SparseRows

_MOST_TEXT = (1 << 31) - 1  # bytes in a column of one batch


def parse_points(raw: pa.RecordBatch, first_row: int, file: str, shape: Shape) -> Parsed:
    """Parse a raw block into points with the columns of `shape`."""
    rows = _Rows(raw, first_row, file)
    text, fields, trim = rows.text(shape), shape.fields, shape.of_labels
    key = pa.array(map(text_key, text.to_pylist()), pa.string()) if shape.keyless else rows.key(fields.key, trim)
    columns = [rows.numbers, key, text]
    if shape.features:
        columns += rows.features(fields)
    if shape.dense:
        columns.append(rows.vector(fields.vector, shape.dense))
    if shape.labels:
        columns += rows.label(fields.label) if shape.single else rows.labels(fields.labels)
    else:
        columns.append(pa.array(np.zeros(len(text), np.int32)))
    return rows.parsed(columns, points_schema("label_keys" if shape.labels else None, shape.features, shape.dense))


def parse_pairs(raw: pa.RecordBatch, first_row: int, file: str, fields: Fields) -> Parsed:
    """Parse a raw block into pairs; pairs with a weight of 0 or less are left out."""
    rows = _Rows(raw, first_row, file)
    columns = [rows.numbers, rows.key(fields.query_key), rows.key(fields.label_key, trim=True)]
    if fields.weight not in raw.schema.names:
        return rows.parsed(columns, pairs_schema())
    relevant = rows.is_positive(fields.weight)
    parsed = rows.parsed(columns, pairs_schema())
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

    def text(self, shape: Shape) -> pa.Array:
        """Return the title followed by the text, or by the content if there is no text; each part may be missing."""
        fields = shape.fields
        absent = pa.array(np.zeros(self.raw.num_rows, bool)), pa.array([""] * self.raw.num_rows, pa.string())
        (has_title, title), (has_body, body), (has_content, content) = (
            (self.raw[name].is_valid(), self._strings(name, "a string", nulls=True))
            if name in self.raw.schema.names
            else absent
            for name in fields.texts
        )
        if shape.needs_text:
            missing = pc.invert(pc.or_(has_title, pc.or_(has_body, has_content)))
            self._reject(missing, Reason.MISSING_FIELD, f"{fields.body} is null")
        rest = pc.if_else(has_body, body, content)
        if shape.text == "title":
            return pc.if_else(has_title, title, rest)
        gap = pc.if_else(pc.and_(pc.not_equal(title, ""), pc.not_equal(rest, "")), " ", "")
        return pc.binary_join_element_wise(title, gap, rest, "")

    def label(self, name: str) -> tuple[pa.Array, pa.Array]:
        """Return the columns label_keys and merged for rows with one label each."""
        offsets = pa.array(np.arange(self.raw.num_rows + 1, dtype=np.int32))
        merged = pa.array(np.zeros(self.raw.num_rows, np.int32))
        self._reject(self.raw[name].is_null(), Reason.NO_LABELS, f"the point has no label ({name} is null or -1)")
        return pa.ListArray.from_arrays(offsets, self.key(name, trim=True)), merged

    def labels(self, name: str) -> tuple[pa.Array, pa.Array]:
        """Return the columns label_keys and merged. A null is no label."""
        if is_list(self.raw[name].type):
            offsets, flat = list_entries(self.raw[name])
        else:
            cells = self._strings(name, "a list of label keys, or text", numbers=True, nulls=True)
            offsets, flat = split_cells(cells, name, self.reject)
        named = flat.is_valid()
        offsets = np.concatenate([[0], np.cumsum(named.to_numpy(zero_copy_only=False))])[offsets]
        if flat.type == pa.string_view():
            flat = flat.cast(pa.string(), safe=False)  # Arrow cannot filter views
        inner = _Rows(pa.record_batch({name: flat.filter(named)}), 0, self.file)
        keys = inner.key(name, trim=True)
        owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        for reject in inner.rejects:
            self.reject(int(owner[reject.line - 1]), reject.reason, reject.detail)
        self._reject(pa.array(np.diff(offsets) == 0), Reason.NO_LABELS, f"the point has no labels ({name} is empty)")
        return unite_keys(keys, offsets)

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
            self._reject(pa.array(~same), Reason.MALFORMED, detail)
            places = np.repeat(beside[:-1] - offsets[:-1], counts) + np.arange(len(number))
            values = np.where(same[owner], np.append(entries, 0.0)[np.minimum(places, len(entries))], 0.0)
        limit = np.finfo(np.float32).max
        wrong = ~(np.abs(values) <= limit)
        self._reject_owners(
            owner[wrong], Reason.MALFORMED, f"{fields.feature_values} contains a value that a 32-bit float cannot hold"
        )
        beyond = ~((number >= 0) & (number < 1 << 31))
        self._reject_owners(owner[beyond], Reason.FEATURE_OUT_OF_RANGE, f"{fields.feature_ids} must be in [0, 2^31)")
        good = ~(wrong | beyond)
        safe = np.where(good, number, 0).astype(np.int64), np.where(good, values, 0).astype(np.float32)
        return feature_columns(SparseRows(*safe, offsets))

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
            self.reject(row, Reason.MALFORMED, WRONG_LENGTH.format(name, counts[row], dense))
        self._reject(
            pa.array(~(np.abs(vectors) <= MOST_FLOAT16).all(axis=1)), Reason.MALFORMED, NOT_FLOAT16.format(name)
        )
        return vector_column(vectors)

    def is_positive(self, name: str) -> np.ndarray:
        """Return whether each number in a column is above 0, bool [B]."""
        column = self.raw[name]
        if COUNT in self.raw.schema.names:  # CSV: all columns are text
            values = parse_numbers(column.fill_null("").cast(pa.large_binary()))
        else:
            values = self._numbers(column, name, whole=False)
        self._reject(pa.array(np.isnan(values)), Reason.WRONG_TYPE, f"{name} must be a number")
        return values > 0

    def _strings(self, name: str, expected: str, numbers: bool = False, nulls: bool = False) -> pa.Array:
        column = self.raw[name]
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        string = pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view()
        if not (string or pa.types.is_null(kind) or (numbers and pa.types.is_integer(kind))):
            raise InputError(f"{self.file}: the column {name!r} is of type {column.type}; expected {expected}.")
        missing = column.is_null()
        if not nulls:
            self._reject(missing, Reason.MISSING_FIELD, f"{name} is null")
        plain = column
        if pa.types.is_dictionary(column.type):
            lengths = pc.binary_length(column.dictionary.cast(pa.large_string())) if string else None
            if lengths is not None and (pc.sum(lengths.take(column.indices)).as_py() or 0) > _MOST_TEXT:
                raise too_large(self.file, len(column))
            plain = column.dictionary_decode()
        content = plain.cast(pa.string(), safe=False).fill_null("").cast(pa.binary())
        return decode_column(
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
        for row in np.flatnonzero(mask.fill_null(False).to_numpy(zero_copy_only=False)).tolist():
            self.reject(row, reason, detail)

    def _reject_owners(self, rows: np.ndarray, reason: Reason, detail: str) -> None:
        for row in np.unique(rows).tolist():
            self.reject(row, reason, detail)
