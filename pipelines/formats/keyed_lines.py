"""JSON lines with string keys: points, labels and pairs, one JSON object a line; blank lines are nothing."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.formats import fast_jsonl, records
from pipelines.formats.base import Parsed, pairs_schema, points_schema
from pipelines.formats.fields import Fields, Shape, text_key
from pipelines.formats.records import Bad, Record
from pipelines.formats.rejects import Reason
from pipelines.formats.sparse import feature_columns
from schemas.ragged import SparseRows, offsets_of

_LARGEST = float(np.finfo(np.float32).max)


def parse_points(raw: pa.RecordBatch, first_row: int, file: str, shape: Shape) -> Parsed:
    """Parse raw lines to points with the columns of `shape`."""
    lines, fields = raw["line"].to_pylist(), shape.fields
    plainest = shape.labels and not (shape.features or shape.keyless or shape.single)
    if plainest and (plain := fast_jsonl.read_points(lines, first_row, fields)) is not None:
        return Parsed(plain, [])

    def read(record: Record, row: int) -> tuple[str, str, Any, list[str], int]:
        features = _feature_pair(record, fields) if shape.features else None
        text = _text(record, shape)
        key = text_key(text) if shape.keyless else _key(records.required(record, fields.key), fields.key)
        point = key, text, features
        if not shape.labels:
            return (*point, [], 0)
        named = [records.required(record, fields.label)] if shape.single else records.required(record, fields.labels)
        if not isinstance(named, list):
            raise Bad(Reason.WRONG_TYPE, f"{fields.labels} must be a list of label keys, got {records.shown(named)}")
        if not named:
            raise Bad(Reason.NO_LABELS, f"the point {records.shown(key)} has no labels ({fields.labels} is empty)")
        keys = [_key(name, fields.labels) for name in named]
        once = sorted(set(keys))
        return (*point, once, len(keys) - len(once))

    rows, good, rejects = records.each(lines, first_row, file, read, skip_blank=True)
    keys, texts, features, named, merged = zip(*good, strict=True) if good else ((), (), (), (), ())
    columns = [rows, keys, texts, *(_features(features) if shape.features else []), *([named] if shape.labels else [])]
    schema = points_schema("label_keys" if shape.labels else None, shape.features)
    return Parsed(pa.record_batch([*columns, merged], schema=schema), rejects)


def parse_pairs(raw: pa.RecordBatch, first_row: int, file: str, fields: Fields) -> Parsed:
    """Parse raw lines to pairs; those of a weight that is not above 0 are left out."""

    def read(record: Record, row: int) -> tuple[str, str, bool]:
        weight = record.get(fields.weight, 1)
        if type(weight) not in (int, float) or weight != weight:
            raise Bad(Reason.WRONG_TYPE, f"{fields.weight} must be a number, got {records.shown(weight)}")
        query, label = (_key(records.required(record, name), name) for name in (fields.query_key, fields.label_key))
        return query, label, weight > 0

    rows, good, rejects = records.each(raw["line"].to_pylist(), first_row, file, read, skip_blank=True)
    kept = [(row, query, label) for row, (query, label, relevant) in zip(rows, good, strict=True) if relevant]
    columns = list(zip(*kept, strict=True)) if kept else [(), (), ()]
    return Parsed(pa.record_batch(columns, schema=pairs_schema()), rejects)


def _key(value: Any, name: str) -> str:
    key = records.key(value, name)
    if not key:
        raise Bad(Reason.MALFORMED, f"{name} holds an empty key")
    return key


def _text(record: Record, shape: Shape) -> str:
    fields = shape.fields
    title = record.get(fields.title)
    name = fields.text if record.get(fields.text) is not None else fields.content
    body = record.get(name)
    if title is None:
        if body is None:
            return "" if shape.features else records.string(records.required(record, fields.text), fields.text)
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
        raise Bad(Reason.WRONG_TYPE, f"{fields.feature_values} must be a list of numbers, got {records.shown(values)}")
    if len(ids) != len(values):
        raise Bad(Reason.MALFORMED, f"{len(ids)} {fields.feature_ids}, but {len(values)} {fields.feature_values}")
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 31:
        raise Bad(Reason.FEATURE_OUT_OF_RANGE, f"{fields.feature_ids} must be in [0, 2^31), got {records.shown(ids)}")
    if any(not abs(value) <= _LARGEST for value in values):
        raise Bad(Reason.MALFORMED, f"{fields.feature_values} holds a value beyond what a 32-bit float holds")
    return ids, values


def _features(rows: Sequence[tuple[list[int], list[float]]]) -> list[pa.Array]:
    offsets = offsets_of(np.array([len(ids) for ids, _ in rows], np.int64))
    ids = np.fromiter(chain.from_iterable(ids for ids, _ in rows), np.int64, offsets[-1])
    values = np.fromiter(chain.from_iterable(values for _, values in rows), np.float32, offsets[-1])
    return feature_columns(SparseRows(ids, values, offsets))
