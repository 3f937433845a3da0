"""Read JSON records, one per line. Each record becomes a tuple of values or a reject, never an error."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orjson

from pipelines.formats.base import Reason, Reject

_SHOWN = 80
_WHOLE = {int}  # bool is excluded: JSON `true` is not a number

T = TypeVar("T")
Record = dict[str, Any]


class InvalidRecord(Exception):
    """Error for an invalid row: `reason` is the reason for rejecting the row, and the message gives details."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def parse_lines(
    lines: Sequence[bytes], first_row: int, file: str, read: Callable[[Record, int], T], skip_blank: bool = False
) -> tuple[list[int], list[T], list[Reject]]:
    """Read raw lines [B] that start at 0-based row `first_row`; return (rows, results of `read`, rejects).

    `read` receives each record and its row number, and may raise InvalidRecord. Blank lines are skipped with
    `skip_blank`, and rejected otherwise.
    """
    rows: list[int] = []
    good: list[T] = []
    rejects: list[Reject] = []
    loads = orjson.loads
    for row, line in enumerate(lines, start=first_row):
        try:
            try:
                record = loads(line)
            except orjson.JSONDecodeError:
                if skip_blank and not line.strip():
                    continue
                record = _explain(line)  # the standard library accepts slightly more, and explains the fault
            if type(record) is not dict:
                raise InvalidRecord(Reason.NOT_OBJECT, f"expected a JSON object, got {shown(record)}")
            good.append(read(record, row))
            rows.append(row)
        except InvalidRecord as bad:
            rejects.append(Reject(file, row + 1, bad.reason, str(bad)))
    return rows, good, rejects


def field_names(line: bytes) -> list[str]:
    """Return the field names of a raw line; empty if the line is not a record."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            record = _explain(line)
        except InvalidRecord:
            return []
    return list(record) if type(record) is dict else []


def required(record: Record, name: str) -> Any:
    """Return the field `name`. Raises InvalidRecord if the field is missing."""
    if name not in record:
        raise InvalidRecord(Reason.MISSING_FIELD, f"the field {name!r} is missing; found {shown(sorted(record))}")
    return record[name]


def string(value: Any, name: str) -> str:
    """Return `value` if it is text that UTF-8 can encode. Raises InvalidRecord."""
    if not isinstance(value, str):
        raise InvalidRecord(Reason.WRONG_TYPE, f"{name} must be a string, got {shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRecord(
                Reason.NOT_UNICODE, f"{name} contains half a surrogate pair at character {error.start}"
            ) from None
    return value


def key(value: Any, name: str) -> str:
    """Return a key: a string, or a whole number of up to 64 bits as its digits. Raises InvalidRecord."""
    if type(value) is not int and not isinstance(value, float):
        return string(value, name)
    if type(value) is float or not -(1 << 63) <= value < 1 << 64:
        bits = value.bit_length() if isinstance(value, int) else 0
        got = f"a number of {bits:,} bits" if bits > 4 * _SHOWN else shown(value)  # Python prints no huge numbers
        raise InvalidRecord(Reason.WRONG_TYPE, f"{name} must be a string or a whole number of up to 64 bits, got {got}")
    return str(value)


def whole_numbers(value: Any, name: str) -> list[int]:
    """Return `value` if it is a list of whole numbers. Raises InvalidRecord."""
    if not isinstance(value, list) or not {*map(type, value)} <= _WHOLE:
        raise InvalidRecord(Reason.WRONG_TYPE, f"{name} must be a list of whole numbers, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Return `value` as text that is safe to print and truncated to the length of a line."""
    try:
        text = ascii(value[: _SHOWN + 1] if isinstance(value, str) else value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _explain(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidRecord(Reason.NOT_JSON, f"not JSON: byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        text = shown(line[:_SHOWN].decode("utf-8", "replace"))
        raise InvalidRecord(Reason.NOT_JSON, f"not JSON ({str(error)[:_SHOWN]}): {text}") from None
