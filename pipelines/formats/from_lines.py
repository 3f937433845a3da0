"""Parse points, labels and pairs from lines: one JSON object per line, or tab-separated pairs. Blank lines are ignored.

Arrow parses blocks in which all points have the simplest form, several times faster than a loop over records. If a
block contains any other line (another type, a missing field, two objects on a line, bytes that are not text), each line
of the block is parsed separately, so that a reject can explain the error.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from pipelines.formats import records
from pipelines.formats.base import Parsed, RawRows, Reason, decode_column, pairs_schema, points_schema
from pipelines.formats.cells import split_cell
from pipelines.formats.names import Fields, Shape, text_key
from pipelines.formats.records import InvalidRecord, Record
from pipelines.formats.sparse import MOST_FLOAT16, NOT_FLOAT16, WRONG_LENGTH, feature_columns, unite_keys, vector_column
from schemas.ragged import SparseRows, offsets_of
from schemas.shard_files.parquet import string_bytes

_ROW = "\x01row"  # added to each object, because Arrow alone would accept an object that ends in another line
# First fields of a header: Extremis's, BEIR's, and other usual names.
_HEADERS = (b"query_key", b"query-id", b"query_id", b"qid")
_NUMBER = r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$"
_LARGEST = float(np.finfo(np.float32).max)


def parse_points(raw: pa.RecordBatch, first_row: int, file: str, shape: Shape) -> Parsed:
    """Parse raw lines into points with the columns of `shape`."""
    lines, fields = raw["line"].to_pylist(), shape.fields
    is_simple = shape.labels and shape.needs_text and not (shape.keyless or shape.single)
    if is_simple and (plain := _parse_simple_block(lines, first_row, fields)) is not None:
        return Parsed(plain, [])

    def read(record: Record, row: int) -> tuple[str, str, Any, Any, list[str], int]:
        features = _feature_pair(record, fields) if shape.features else None
        vector = _vector(record, fields.vector, shape.dense) if shape.dense else None
        text = _text(record, shape)
        name = fields.key
        key = text_key(text) if shape.keyless else _key(records.required(record, name), name, shape.of_labels)
        point = key, text, features, vector
        if not shape.labels:
            return (*point, [], 0)
        name = fields.label if shape.single else fields.labels
        named = [records.required(record, name)] if shape.single else records.required(record, name)
        if isinstance(named, str):
            named = split_cell(named, name)
        if not isinstance(named, list):
            raise InvalidRecord(Reason.WRONG_TYPE, f"{name} must be a list of label keys, got {records.shown(named)}")
        keys = [_key(value, name, trim=True) for value in named if value is not None]  # a null is no label
        if not keys:
            raise InvalidRecord(Reason.NO_LABELS, f"the point {records.shown(key)} has no labels ({name} is empty)")
        once = sorted(set(keys))
        return (*point, once, len(keys) - len(once))

    rows, good, rejects = records.parse_lines(lines, first_row, file, read, skip_blank=True)
    keys, texts, features, vectors, named, merged = zip(*good, strict=True) if good else ((), (), (), (), (), ())
    columns: list[Any] = [rows, keys, texts, *(_features(features) if shape.features else [])]
    columns += [vector_column(np.array(vectors, np.float64).reshape(-1, shape.dense))] if shape.dense else []
    columns += [named] if shape.labels else []
    schema = points_schema("label_keys" if shape.labels else None, shape.features, shape.dense)
    return Parsed(pa.record_batch([*columns, merged], schema=schema), rejects)


def parse_pairs(raw: pa.RecordBatch, first_row: int, file: str, fields: Fields) -> Parsed:
    """Parse raw lines into pairs; pairs with a weight of 0 or less are left out."""

    def read(record: Record, row: int) -> tuple[str, str, bool]:
        weight = record.get(fields.weight, 1)
        if type(weight) not in (int, float) or weight != weight:
            raise InvalidRecord(Reason.WRONG_TYPE, f"{fields.weight} must be a number, got {records.shown(weight)}")
        query = _key(records.required(record, fields.query_key), fields.query_key)
        label = _key(records.required(record, fields.label_key), fields.label_key, trim=True)
        return query, label, weight > 0

    rows, good, rejects = records.parse_lines(raw["line"].to_pylist(), first_row, file, read, skip_blank=True)
    kept = [(row, query, label) for row, (query, label, relevant) in zip(rows, good, strict=True) if relevant]
    columns = list(zip(*kept, strict=True)) if kept else [(), (), ()]
    return Parsed(pa.record_batch(columns, schema=pairs_schema()), rejects, len(rows) - len(kept))


def _key(value: Any, name: str, trim: bool = False) -> str:
    key = records.key(value, name)
    key = key.strip() if trim else key
    if not key:
        raise InvalidRecord(Reason.MALFORMED, f"{name} contains an empty key")
    return key


def _text(record: Record, shape: Shape) -> str:
    fields = shape.fields
    title = record.get(fields.title)
    name = fields.text if record.get(fields.text) is not None else fields.content
    body = record.get(name)
    if title is None:
        if body is None:
            return records.string(records.required(record, fields.body), fields.body) if shape.needs_text else ""
        return records.string(body, name)
    title = records.string(title, fields.title)
    if body is None or shape.text == "title":
        return title
    body = records.string(body, name)
    return f"{title} {body}" if title and body else title or body


def _feature_pair(record: Record, fields: Fields) -> tuple[list[int], list[float]]:
    ids = records.whole_numbers(record.get(fields.feature_ids) or [], fields.feature_ids)
    values = record.get(fields.feature_values)
    values = [1.0] * len(ids) if values is None else values
    if not isinstance(values, list) or not {*map(type, values)} <= {int, float}:
        raise InvalidRecord(
            Reason.WRONG_TYPE, f"{fields.feature_values} must be a list of numbers, got {records.shown(values)}"
        )
    if len(ids) != len(values):
        raise InvalidRecord(
            Reason.MALFORMED, f"{len(ids)} {fields.feature_ids}, but {len(values)} {fields.feature_values}"
        )
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 31:
        raise InvalidRecord(
            Reason.FEATURE_OUT_OF_RANGE, f"{fields.feature_ids} must be in [0, 2^31), got {records.shown(ids)}"
        )
    if any(not abs(value) <= _LARGEST for value in values):
        raise InvalidRecord(
            Reason.MALFORMED, f"{fields.feature_values} contains a value that a 32-bit float cannot hold"
        )
    return ids, values


def _vector(record: Record, name: str, dense: int) -> list[float]:
    values = records.required(record, name)
    if not isinstance(values, list) or not {*map(type, values)} <= {int, float}:
        raise InvalidRecord(Reason.WRONG_TYPE, f"{name} must be a list of numbers, got {records.shown(values)}")
    if len(values) != dense:
        raise InvalidRecord(Reason.MALFORMED, WRONG_LENGTH.format(name, len(values), dense))
    if any(not abs(value) <= MOST_FLOAT16 for value in values):
        raise InvalidRecord(Reason.MALFORMED, NOT_FLOAT16.format(name))
    return values


def _features(rows: Sequence[tuple[list[int], list[float]]]) -> list[pa.Array]:
    offsets = offsets_of(np.array([len(ids) for ids, _ in rows], np.int64))
    ids = np.fromiter(chain.from_iterable(ids for ids, _ in rows), np.int64, offsets[-1])
    values = np.fromiter(chain.from_iterable(values for _, values in rows), np.float32, offsets[-1])
    return feature_columns(SparseRows(ids, values, offsets))


def _parse_simple_block(lines: Sequence[bytes], first_row: int, fields: Fields) -> pa.RecordBatch | None:
    """Parse raw lines [B] into points with only key, text and labels; return None unless every line is valid."""
    marked = [b'{"\\u0001row":%d,%b' % (row, line[1:]) for row, line in enumerate(lines) if line[:1] == b"{"]
    if not lines or len(marked) < len(lines):
        return None
    texts = [(name, pa.string()) for name in (fields.key, fields.text, fields.title)]
    schema = pa.schema([(_ROW, pa.int64()), *texts, (fields.labels, pa.list_(pa.string()))])
    if len(schema.names) > len(set(schema.names)):
        return None
    content = b"\n".join(marked)
    try:
        table = pyarrow.json.read_json(
            pa.BufferReader(content),
            pyarrow.json.ReadOptions(use_threads=False, block_size=len(content) + 1),
            pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        ).combine_chunks()
        table.validate(full=True)
    except pa.ArrowException:
        return None
    rows, keys, texts, titles, labels = (column.combine_chunks() for column in table.select(schema.names).columns)
    count = len(lines)
    if len(rows) != count or rows.null_count or (rows.to_numpy() != np.arange(count)).any():
        return None
    named = pc.utf8_trim_whitespace(labels.flatten())
    offsets = labels.offsets.to_numpy()
    if keys.null_count or texts.null_count or titles.null_count < count or labels.null_count or named.null_count:
        return None
    if (np.diff(offsets) == 0).any() or not all(string_bytes(column).counts.all() for column in (keys, named)):
        return None
    columns = [pa.array(np.arange(first_row, first_row + count)), keys, texts, *unite_keys(named, offsets - offsets[0])]
    return pa.record_batch(columns, schema=points_schema("label_keys", features=False))


def parse_tabbed_pairs(raw: pa.RecordBatch, first_row: int, file: str) -> Parsed:
    """Parse raw lines into pairs; pairs with a weight of 0 or less and empty lines are left out."""
    block, lines = RawRows(raw, first_row, file), raw["line"]

    def reject(row: int, reason: Reason, problem: str) -> None:
        shown = records.shown(lines[row].as_py()[:200].decode("utf-8", "replace"))
        block.reject(row, reason, f"{problem}{shown}")

    split = pc.split_pattern(lines, "\t")
    fields, count = split.values, split.value_lengths().to_numpy()
    first = split.offsets.to_numpy()[:-1]  # each line's first field
    full = pc.binary_length(fields).to_numpy() > 0

    blank = (count == 1) & ~full[first]
    if first_row == 0 and len(lines) and fields[0].as_py() in _HEADERS:
        blank[0] = True
    good = ~blank
    for row in np.flatnonzero(good & (count != 2) & (count != 3)).tolist():
        reject(row, Reason.MALFORMED, "expected query key, label key[, weight] separated by tabs, got ")
        good[row] = False
    for row in np.flatnonzero(good)[~(full[first[good]] & full[first[good] + 1])].tolist():
        reject(row, Reason.MALFORMED, "an empty key: ")
        good[row] = False
    weighted = np.flatnonzero(good & (count == 3))
    weights = parse_numbers(fields.take(pa.array(first[weighted] + 2)))
    for row in weighted[np.isnan(weights)].tolist():
        reject(row, Reason.MALFORMED, "the weight is not a number: ")
    good[weighted[~(weights > 0)]] = False
    left_out = int(np.count_nonzero(weights <= 0))
    rows = np.flatnonzero(good)
    keys = [
        decode_column(
            fields.take(pa.array(first[rows] + number)),
            lambda place, _: reject(int(rows[place]), Reason.NOT_UNICODE, "a key is not UTF-8: "),
        )
        for number in (0, 1)
    ]
    keys[1] = pc.utf8_trim_whitespace(keys[1])
    for row in rows[pc.equal(keys[1], "").to_numpy(zero_copy_only=False)].tolist():
        reject(row, Reason.MALFORMED, "an empty key: ")
    batch = pa.record_batch([pa.array(rows + first_row), *keys], schema=pairs_schema())
    return Parsed(batch.filter(block.good(rows)), block.rejects, left_out)


def parse_numbers(fields: pa.LargeBinaryArray) -> np.ndarray:
    """Parse each field as a number, float64 [B]; a field that is not a number becomes NaN."""
    values = np.full(len(fields), np.nan)
    good = pc.match_substring_regex(fields, _NUMBER)
    numbers = fields.filter(good).cast(pa.string())
    places = good.to_numpy(zero_copy_only=False)
    try:
        values[places] = numbers.cast(pa.float64()).to_numpy()
    except pa.ArrowInvalid:  # Python reads numbers that Arrow may refuse: with a plus sign, or too large
        values[places] = [float(number) for number in numbers.to_pylist()]
    return values
