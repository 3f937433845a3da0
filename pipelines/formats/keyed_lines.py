"""JSON lines with string keys: points, labels and pairs, one JSON object a line."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from pipelines.formats import fast_jsonl as clean_lines
from pipelines.formats import records
from pipelines.formats.base import Parsed, labels_schema, list_column, pairs_schema, points_schema
from pipelines.formats.fields import Fields
from pipelines.formats.records import Bad, Record
from pipelines.formats.rejects import Reason, Reject
from pipelines.formats.sparse import merge_features
from schemas.ragged import SparseRows
from schemas.shard_files import parquet

T = TypeVar("T")


def parse_points(
    lines: Sequence[bytes], first_row: int, file: str, fields: Fields, text: str, features: bool, labels: bool
) -> Parsed:
    """Points of raw lines [B]; columns by `features` and `labels` (False: labels come from pairs)."""
    if labels and not features and (clean := clean_lines.read_points(lines, first_row, fields)) is not None:
        return Parsed(clean, [])

    def read(record: Record, row: int) -> tuple[str, str, Any, list[str], int]:
        point = _named(record, fields, text, features)
        if not labels:
            return (*point, [], 0)
        named = records.required(record, fields.labels)
        if not isinstance(named, list):
            raise Bad(Reason.WRONG_TYPE, f"{fields.labels} must be a list of label keys, got {records.shown(named)}")
        if not named:
            raise Bad(Reason.NO_LABELS, f"the point {records.shown(point[0])} has no labels ({fields.labels} is empty)")
        keys = [_key(key, fields.labels) for key in named]
        once = sorted(set(keys))
        return (*point, once, len(keys) - len(once))

    rows, good, rejects = _each(lines, first_row, file, read)
    keys, texts, of_features, named, merged = zip(*good, strict=True) if good else ((), (), (), (), ())
    columns = [rows, keys, texts, *(_features(of_features) if features else [])]
    if labels:
        columns.append(_strings(named))
    schema = points_schema("label_keys" if labels else None, features)
    return Parsed(pa.record_batch([*columns, merged], schema=schema), rejects)


def parse_labels(
    lines: Sequence[bytes], first_row: int, file: str, fields: Fields, text: str, features: bool
) -> Parsed:
    """Labels of raw lines [B]."""
    rows, good, rejects = _each(lines, first_row, file, lambda record, row: _named(record, fields, text, features))
    keys, texts, of_features = zip(*good, strict=True) if good else ((), (), ())
    columns = [rows, keys, texts, *(_features(of_features) if features else [])]
    return Parsed(pa.record_batch(columns, schema=labels_schema(features)), rejects)


def parse_pairs(lines: Sequence[bytes], first_row: int, file: str, fields: Fields) -> Parsed:
    """Pairs of raw lines [B]; those of a weight that is not above 0 are left out."""

    def read(record: Record, row: int) -> tuple[str, str, bool]:
        weight = record.get(fields.weight, 1)
        if type(weight) not in (int, float) or weight != weight:
            raise Bad(Reason.WRONG_TYPE, f"{fields.weight} must be a number, got {records.shown(weight)}")
        query, label = (_key(records.required(record, name), name) for name in (fields.query_key, fields.label_key))
        return query, label, weight > 0

    rows, good, rejects = _each(lines, first_row, file, read)
    kept = [(row, query, label) for row, (query, label, relevant) in zip(rows, good, strict=True) if relevant]
    columns = list(zip(*kept, strict=True)) if kept else [(), (), ()]
    return Parsed(pa.record_batch(columns, schema=pairs_schema()), rejects)


def _each(
    lines: Sequence[bytes], first_row: int, file: str, read: Callable[[Record, int], T]
) -> tuple[list[int], list[T], list[Reject]]:
    """As `records.each`; blank lines are nothing."""
    blank = [i for i, line in enumerate(lines) if not line or line.isspace()]
    if not blank:
        return records.each(lines, first_row, file, read)
    found = records.each(lines, first_row, file, read)
    gone = {first_row + i + 1 for i in blank}
    return found[0], found[1], [reject for reject in found[2] if reject.line not in gone]


def _named(record: Record, fields: Fields, text: str, features: bool) -> tuple[str, str, Any]:
    """(key, text, features) of a point or label."""
    found = _feature_pair(record, fields) if features else None
    return _key(records.required(record, fields.key), fields.key), _text(record, fields, text, features), found


def _key(value: Any, name: str) -> str:
    key = records.key(value, name)
    if not key:
        raise Bad(Reason.MALFORMED, f"{name} holds an empty key")
    return key


def _text(record: Record, fields: Fields, text: str, features: bool) -> str:
    title = record.get(fields.title)
    name = fields.text if record.get(fields.text) is not None else fields.content
    body = record.get(name)
    if title is None:
        if body is None:
            return "" if features else records.string(records.required(record, fields.text), fields.text)
        return records.string(body, name)
    title = records.string(title, fields.title)
    if body is None or text == "title":
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


_LARGEST = float(np.finfo(np.float32).max)


def _features(rows: Sequence[tuple[list[int], list[float]]]) -> list[pa.Array]:
    ids = list_column([ids for ids, _ in rows], pa.int64())
    values = np.fromiter(chain.from_iterable(values for _, values in rows), np.float32, len(ids.values))
    return feature_columns(SparseRows(ids.values.to_numpy(), values, ids.offsets.to_numpy().astype(np.int64)))


def feature_columns(found: SparseRows) -> list[pa.Array]:
    """The columns feature_ids and feature_values of rows of features."""
    kept = merge_features(found)
    return [
        parquet.list_array(kept.ids.astype(np.int32), kept.offsets, pa.int32()),
        parquet.list_array(kept.values, kept.offsets, pa.float32()),
    ]


def _strings(rows: Sequence[list[str]]) -> pa.ListArray:
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(list(chain.from_iterable(rows)), pa.string()))
