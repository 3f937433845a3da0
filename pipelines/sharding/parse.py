"""Raw lines to columns: each line is either a valid record or a reject with its reason, never an exception."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from pipelines.sharding.rejects import Reason, Reject
from schemas import parquet

TEXTS = ("title+content", "title")
_SHOWN = 80
_WHOLE = {int}  # not bool, which JSON spells `true`

T = TypeVar("T")


@dataclass(frozen=True)
class Points:
    """Valid points of some lines.

    `batch` columns: row int64 (0-based line), key string, text string, label_ids list<int64> (sorted, unique), merged
    int32 (labels that the point named again).
    """

    batch: pa.RecordBatch
    rejects: list[Reject]


@dataclass(frozen=True)
class Labels:
    """Labels of some lines, one a line: a rejected line keeps its row, with an empty text, so that ids stay dense.

    `batch` columns: label_id int64 (0-based line), key string, text string.
    """

    batch: pa.RecordBatch
    rejects: list[Reject]


def parse_points(lines: Sequence[bytes], first_row: int, file: str, labels: int, text: str) -> Points:
    """Points from raw lines [B] that start at 0-based row `first_row` of `file`; label ids are in [0, labels)."""
    good, rejects = _each(lines, first_row, file, lambda record, row: _point(record, row, labels, text))
    keys, texts, ids, merged = zip(*(point for _, point in good), strict=True) if good else ((), (), (), ())
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in ids], dtype=np.int64)])
    values = np.fromiter(chain.from_iterable(ids), np.int64, int(offsets[-1]))
    batch = pa.record_batch(
        {
            "row": pa.array([row for row, _ in good], pa.int64()),
            "key": pa.array(keys, pa.string()),
            "text": pa.array(texts, pa.string()),
            "label_ids": parquet.list_array(values, offsets, pa.int64()),
            "merged": pa.array(merged, pa.int32()),
        }
    )
    return Points(batch, rejects)


def parse_labels(lines: Sequence[bytes], first_row: int, file: str, text: str) -> Labels:
    """Labels from raw lines [B] that start at 0-based row `first_row` of `file`."""
    good, rejects = _each(lines, first_row, file, lambda record, row: (_key(record, row), _text(record, text)))
    found = dict(good)
    rows = range(first_row, first_row + len(lines))
    records = [found.get(row, ("", "")) for row in rows]
    batch = pa.record_batch(
        {
            "label_id": pa.array(rows, pa.int64()),
            "key": pa.array([key for key, _ in records], pa.string()),
            "text": pa.array([body for _, body in records], pa.string()),
        }
    )
    return Labels(batch, rejects)


class _Bad(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def _each(
    lines: Sequence[bytes], first_row: int, file: str, read: Callable[[dict[str, Any], int], T]
) -> tuple[list[tuple[int, T]], list[Reject]]:
    good: list[tuple[int, T]] = []
    rejects: list[Reject] = []
    for row, line in enumerate(lines, start=first_row):
        try:
            good.append((row, read(_record(line), row)))
        except _Bad as bad:
            rejects.append(Reject(file, row + 1, bad.reason, str(bad)))
    return good, rejects


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Bad(Reason.NOT_JSON, f"not JSON: byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        shown = _shown(line[:_SHOWN].decode("utf-8", "replace"))
        raise _Bad(Reason.NOT_JSON, f"not JSON ({str(error)[:_SHOWN]}): {shown}") from None
    if not isinstance(record, dict):
        raise _Bad(Reason.NOT_OBJECT, f"expected a JSON object, got {_shown(record)}")
    return record


def _point(record: dict[str, Any], row: int, labels: int, text: str) -> tuple[str, str, list[int], int]:
    key, body = _key(record, row), _text(record, text)
    target = _required(record, "target_ind")
    if not isinstance(target, list) or not {*map(type, target)} <= _WHOLE:
        raise _Bad(Reason.WRONG_TYPE, f"target_ind must be a list of whole numbers, got {_shown(target)}")
    if not target:
        raise _Bad(Reason.NO_LABELS, f"the point {_shown(key)} has no labels (target_ind is empty)")
    ids = sorted(set(target))
    if ids[0] < 0 or ids[-1] >= labels:
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise _Bad(
            Reason.LABEL_OUT_OF_RANGE, f"target_ind {_shown(wrong)} does not exist: there are labels 0 to {labels - 1}"
        )
    return key, body, ids, len(target) - len(ids)


def _key(record: dict[str, Any], row: int) -> str:
    """The uid; a record without one is known by its row, as `#17`."""
    uid = record.get("uid")
    if uid is None:
        return f"#{row}"
    if type(uid) is int:
        return str(uid)
    return _string(uid, "uid")


def _text(record: dict[str, Any], text: str) -> str:
    title = _string(_required(record, "title"), "title")
    content = record.get("content")
    if content is None or text == "title":
        return title
    content = _string(content, "content")
    return f"{title} {content}" if content else title


def _required(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise _Bad(Reason.MISSING_FIELD, f"the field {name!r} is missing; found {_shown(sorted(record))}")
    return record[name]


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _Bad(Reason.WRONG_TYPE, f"{name} must be a string, got {_shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _Bad(Reason.NOT_UNICODE, f"{name} holds half a surrogate pair at character {error.start}") from None
    return value


def _shown(value: Any) -> str:
    """`value` as JSON would show it, cut to a line's length and safe to print."""
    try:
        shown = ascii(value[: _SHOWN + 1] if isinstance(value, str) else value)
    except RecursionError:
        shown = f"a deeply nested {type(value).__name__}"
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
