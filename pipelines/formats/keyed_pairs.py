"""Tab-separated pairs: query key, label key, and where there is one a weight; with or without a header."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats import records, sparse
from pipelines.formats.base import Parsed, pairs_schema
from pipelines.formats.rejects import Reason, Reject

_TAB = ord("\t")
# First fields of a header: ours, BEIR's, and those of others.
_HEADERS = (b"query_key", b"query-id", b"query_id", b"qid")
_NUMBER = r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$"


def parse_pairs(lines: pa.LargeBinaryArray, first_row: int, file: str) -> Parsed:
    """Pairs of raw lines [B]; those of a weight that is not above 0 are left out, blank lines are nothing."""
    data, offsets = sparse.as_numpy(lines)
    tabs = np.flatnonzero(data == _TAB)
    at = np.searchsorted(tabs, offsets)
    count = np.diff(at) + 1  # fields of each line
    start = np.insert(tabs + 1, at[:-1], offsets[:-1])
    ends = np.append(np.insert(tabs, at[:-1], offsets[:-1])[1:], len(data))
    every = np.zeros(len(start) + 1, np.int64)
    np.cumsum(ends - start, out=every[1:])
    fields = sparse.as_lines(data[data != _TAB], every)
    first = np.arange(len(lines)) + at[:-1]  # each line's first field
    full = np.diff(every) > 0

    wrong = _Wrong(file, first_row)
    blank = (count == 1) & ~full[first]
    if first_row == 0 and len(lines) and fields[0].as_py() in _HEADERS:
        blank[0] = True
    good = ~blank
    for row in np.flatnonzero(good & (count != 2) & (count != 3)).tolist():
        wrong.add(
            row, Reason.MALFORMED, f"expected query key, label key[, weight] between tabs, got {_shown(lines, row)}"
        )
        good[row] = False
    for row in np.flatnonzero(good)[~(full[first[good]] & full[first[good] + 1])].tolist():
        wrong.add(row, Reason.MALFORMED, f"an empty key: {_shown(lines, row)}")
        good[row] = False
    weighted = np.flatnonzero(good & (count == 3))
    weights = _numbers(fields.take(pa.array(first[weighted] + 2)))
    for row in weighted[np.isnan(weights)].tolist():
        wrong.add(row, Reason.MALFORMED, f"the weight is no number: {_shown(lines, row)}")
    good[weighted[~(weights > 0)]] = False
    rows = np.flatnonzero(good)
    keys = []
    for number in (0, 1):
        column = fields.take(pa.array(first[rows] + number))
        try:
            keys.append(column.cast(pa.string()))
        except pa.ArrowInvalid:
            for row, key in zip(rows.tolist(), column.to_pylist(), strict=True):
                if not _is_utf8(key):
                    wrong.add(row, Reason.NOT_UNICODE, f"a key is not UTF-8: {_shown(lines, row)}")
            keys.append(pa.array([key.decode("utf-8", "replace") for key in column.to_pylist()], pa.string()))
    batch = pa.record_batch([pa.array(rows + first_row), *keys], schema=pairs_schema())
    if wrong.rejects:
        batch = batch.filter(pa.array(~np.isin(rows, list(wrong.rejects))))
    return Parsed(batch, [wrong.rejects[row] for row in sorted(wrong.rejects)])


class _Wrong:
    def __init__(self, file: str, first_row: int) -> None:
        self._file, self._first = file, first_row
        self.rejects: dict[int, Reject] = {}

    def add(self, row: int, reason: Reason, detail: str) -> None:
        self.rejects.setdefault(row, Reject(self._file, self._first + row + 1, reason, detail))


def _numbers(fields: pa.LargeBinaryArray) -> np.ndarray:
    """The number in each field, NaN where it is none: float64 [B]."""
    try:
        text = fields.cast(pa.string())
        if pc.all(pc.match_substring_regex(text, _NUMBER)).as_py() is not False:
            return text.cast(pa.float64()).to_numpy()
    except pa.ArrowInvalid:
        pass
    return np.array([_number(field) for field in fields.to_pylist()], np.float64)


def _number(field: bytes) -> float:
    try:
        text = field.decode("ascii")
        return float(text) if pc.match_substring_regex(pa.scalar(text), _NUMBER).as_py() else float("nan")
    except ValueError:
        return float("nan")


def _is_utf8(key: bytes) -> bool:
    try:
        key.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _shown(lines: pa.LargeBinaryArray, row: int) -> str:
    return records.shown(lines[row].as_py()[:200].decode("utf-8", "replace"))
