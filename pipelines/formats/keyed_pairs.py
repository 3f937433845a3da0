"""Tab-separated pairs: query key, label key, and where there is one a weight; with or without a header."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats import records
from pipelines.formats.base import Parsed, RawRows, decode_column, pairs_schema
from pipelines.formats.rejects import Reason

# First fields of a header: ours, BEIR's, and those of others.
_HEADERS = (b"query_key", b"query-id", b"query_id", b"qid")
_NUMBER = r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$"


def parse_pairs(raw: pa.RecordBatch, first_row: int, file: str) -> Parsed:
    """Parse raw lines to pairs; those of a weight that is not above 0 are left out, blank lines are nothing."""
    block, lines = RawRows(raw, first_row), raw["line"]

    def reject(row: int, reason: Reason, problem: str) -> None:
        block.reject(row, file, first_row + row + 1, reason, f"{problem}{_shown(lines, row)}")

    split = pc.split_pattern(lines, "\t")
    fields, count = split.values, split.value_lengths().to_numpy()
    first = split.offsets.to_numpy()[:-1]  # each line's first field
    full = pc.binary_length(fields).to_numpy() > 0

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
    keys = [
        decode_column(
            fields.take(pa.array(first[rows] + number)),
            lambda place, _: reject(int(rows[place]), Reason.NOT_UNICODE, "a key is not UTF-8: "),
        )
        for number in (0, 1)
    ]
    batch = pa.record_batch([pa.array(rows + first_row), *keys], schema=pairs_schema())
    return Parsed(batch.filter(block.good(rows)), block.rejects)


def _numbers(fields: pa.LargeBinaryArray) -> np.ndarray:
    """Read the number in each field, NaN where it is none: float64 [B]."""
    values = np.full(len(fields), np.nan)
    good = pc.match_substring_regex(fields, _NUMBER)
    numbers = fields.filter(good).cast(pa.string())
    places = good.to_numpy(zero_copy_only=False)
    try:
        values[places] = numbers.cast(pa.float64()).to_numpy()
    except pa.ArrowInvalid:  # Python reads what Arrow may not: a plus sign, a number beyond the largest
        values[places] = [float(number) for number in numbers.to_pylist()]
    return values


def _shown(lines: pa.LargeBinaryArray, row: int) -> str:
    return records.shown(lines[row].as_py()[:200].decode("utf-8", "replace"))
