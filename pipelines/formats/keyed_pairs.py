"""Tab-separated pairs: query key, label key, and where there is one a weight; with or without a header."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats import records, sparse
from pipelines.formats.base import Parsed, RawRows, pairs_schema
from pipelines.formats.rejects import Reason

_TAB = ord("\t")
# First fields of a header: ours, BEIR's, and those of others.
_HEADERS = (b"query_key", b"query-id", b"query_id", b"qid")
_NUMBER = r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$"


def parse_pairs(raw: pa.RecordBatch, first_row: int, file: str) -> Parsed:
    """Parse raw lines to pairs; those of a weight that is not above 0 are left out, blank lines are nothing."""
    block, lines = RawRows(raw, first_row), raw["line"]

    def reject(row: int, reason: Reason, problem: str) -> None:
        block.reject(row, file, first_row + row + 1, reason, f"{problem}{_shown(lines, row)}")

    data, offsets = sparse.as_numpy(lines)
    tabs = np.flatnonzero(data == _TAB)
    breaks = np.searchsorted(tabs, offsets)
    count = np.diff(breaks) + 1  # fields of each line
    start = np.insert(tabs + 1, breaks[:-1], offsets[:-1])
    ends = np.append(np.insert(tabs, breaks[:-1], offsets[:-1])[1:], len(data))
    every = np.zeros(len(start) + 1, np.int64)
    np.cumsum(ends - start, out=every[1:])
    fields = sparse.as_lines(data[data != _TAB], every)
    first = np.arange(len(lines)) + breaks[:-1]  # each line's first field
    full = np.diff(every) > 0

    blank = (count == 1) & ~full[first]
    if first_row == 0 and len(lines) and fields[0].as_py() in _HEADERS:
        blank[0] = True
    good = ~blank
    for row in np.flatnonzero(good & (count != 2) & (count != 3)).tolist():
        reject(row, Reason.MALFORMED, "expected query key, label key[, weight] between tabs, got ")
        good[row] = False
    for row in np.flatnonzero(good)[~(full[first[good]] & full[first[good] + 1])].tolist():
        reject(row, Reason.MALFORMED, "an empty key: ")
        good[row] = False
    weighted = np.flatnonzero(good & (count == 3))
    weights = _numbers(fields.take(pa.array(first[weighted] + 2)))
    for row in weighted[np.isnan(weights)].tolist():
        reject(row, Reason.MALFORMED, "the weight is no number: ")
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
                    reject(row, Reason.NOT_UNICODE, "a key is not UTF-8: ")
            keys.append(pa.array([key.decode("utf-8", "replace") for key in column.to_pylist()], pa.string()))
    batch = pa.record_batch([pa.array(rows + first_row), *keys], schema=pairs_schema())
    return Parsed(batch.filter(block.good(rows)), block.rejects)


def _numbers(fields: pa.LargeBinaryArray) -> np.ndarray:
    """Read the number in each field, NaN where it is none: float64 [B]."""
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
