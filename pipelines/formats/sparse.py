"""Sparse text: lines of `index:value` fields, or of indices alone, to ragged arrays, without a Python loop over them.

Where a block holds a line that is malformed, a careful pass names it and the fast one reads the rest, so that a good
line gives the same arrays whatever stands beside it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipelines.formats import records
from schemas.ragged import SparseRows

MAX_DIGITS = 18  # of an index: what int64 holds for certain
_SHOWN = 200
_FIELD, _SPACE, _MARK, _OTHER = 0, 1, 2, 3
_PAIR = re.compile(rb"[0-9]{1,18}:[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_INDEX = re.compile(rb"[0-9]{1,18}")


def parse_pairs(lines: pa.LargeBinaryArray) -> tuple[SparseRows, dict[int, str]]:
    """Lines [B] of fields `index:value` that spaces or tabs separate, to (rows [B], what is wrong by line).

    A line that is wrong gives an empty row. Order and repetitions inside a row stay as they are.
    """
    found, wrong = _parse(lines, _pairs, _wrong_pair)
    finite, beyond = only_finite(found)
    return finite, wrong | beyond


def parse_indices(lines: pa.LargeBinaryArray) -> tuple[SparseRows, dict[int, str]]:
    """Lines [B] of indices that commas separate, to (rows [B] with every value 1, what is wrong by line)."""
    return _parse(lines, _indices, _wrong_index)


def only_finite(found: SparseRows) -> tuple[SparseRows, dict[int, str]]:
    """(the rows, those with a value that is not finite emptied; what is wrong with these)."""
    finite = np.isfinite(found.values)
    if finite.all():
        return found, {}
    rows = found.row_of()
    wrong = np.unique(rows[~finite])
    kept = found.keep(~np.isin(rows, wrong))
    return kept, dict.fromkeys(wrong.tolist(), "a value is beyond what a 32-bit float holds")


def cut_at_space(lines: pa.LargeBinaryArray) -> tuple[pa.LargeBinaryArray, pa.LargeBinaryArray]:
    """Each line [B] before its first space, and from it on (nothing where there is none)."""
    data, offsets = as_numpy(lines)
    spaces = np.flatnonzero(data == ord(" "))
    if not len(spaces):
        return lines, pa.nulls(len(lines), pa.large_binary()).fill_null(b"")
    nearest = np.searchsorted(spaces, offsets[:-1])
    first = np.where(nearest < len(spaces), spaces[np.minimum(nearest, len(spaces) - 1)], len(data))
    cut = np.minimum(first, offsets[1:])
    # A byte is in the head from its line's start up to the cut: +1 there, -1 here, and a running sum says where it is.
    steps = np.zeros(len(data) + 1, np.int8)
    filled = cut > offsets[:-1]
    steps[offsets[:-1][filled]] = 1
    steps[cut[filled & (cut < offsets[1:])]] = -1
    whole = filled & (cut == offsets[1:])
    following = offsets[1:][whole]
    steps[following] = np.where(steps[following] == 1, 0, -1)
    head = np.cumsum(steps[:-1], dtype=np.int8).astype(bool)
    heads = np.concatenate([[0], np.cumsum(cut - offsets[:-1])])
    return as_lines(data[head], heads), as_lines(data[~head], offsets - heads)


def sort_rows(found: SparseRows) -> SparseRows:
    """The same rows with ascending indices; entries of one index keep their order."""
    rows = found.row_of()
    if not len(rows) or not ((np.diff(found.ids) <= 0) & (rows[1:] == rows[:-1])).any():
        return found
    order = np.lexsort((found.ids, rows))
    return SparseRows(found.ids[order], found.values[order], found.offsets)


def merge_labels(found: SparseRows) -> tuple[SparseRows, np.ndarray]:
    """(rows of labels, sorted, once each; how many each row named again: int32 [B]). A label has a positive value."""
    found = sort_rows(found.keep(found.values > 0))
    again = _again(found)
    merged = np.bincount(found.row_of()[again], minlength=found.rows).astype(np.int32)
    return found.keep(~again), merged


def merge_features(found: SparseRows) -> SparseRows:
    """Rows of features, sorted, once each; the values of a feature that a row names again are added up, in order."""
    found = sort_rows(found)
    again = _again(found)
    if not again.any():
        return found
    first = np.flatnonzero(~again)
    sums = np.add.reduceat(found.values.astype(np.float64), first)
    limit = np.finfo(np.float32).max
    once = found.keep(~again)
    return once._replace(values=np.clip(sums, -limit, limit).astype(np.float32))


def as_numpy(lines: pa.LargeBinaryArray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes uint8 [V], offsets int64 [B + 1] starting at 0) of a binary array without nulls, not copied."""
    _, offsets, data = lines.buffers()
    bounds = np.frombuffer(offsets, np.int64)[lines.offset : lines.offset + len(lines) + 1]
    content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return content[bounds[0] : bounds[-1]], bounds - bounds[0]


def as_lines(data: np.ndarray, offsets: np.ndarray) -> pa.LargeBinaryArray:
    """The binary array of bytes uint8 [V] and offsets [B + 1]."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets, np.int64)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def _again(found: SparseRows) -> np.ndarray:
    """Whether each entry of sorted rows [V] has the index of the one before it in its row."""
    again = np.zeros(len(found.ids), bool)
    rows = found.row_of()
    again[1:] = (found.ids[1:] == found.ids[:-1]) & (rows[1:] == rows[:-1])
    return again


def _parse(
    lines: pa.LargeBinaryArray,
    fast: Callable[[np.ndarray, np.ndarray], SparseRows | None],
    what_is_wrong: Callable[[bytes], str | None],
) -> tuple[SparseRows, dict[int, str]]:
    found = fast(*as_numpy(lines))
    if found is not None:
        return found, {}
    each = lines.to_pylist()
    wrong = {row: detail for row, line in enumerate(each) if (detail := what_is_wrong(line)) is not None}
    for row in wrong:
        each[row] = b""
    found = fast(*as_numpy(pa.array(each, pa.large_binary())))
    assert found is not None, "what the careful pass accepts, the fast one reads"
    return found, wrong


def _classes(fields: bytes, spaces: bytes, mark: bytes) -> np.ndarray:
    table = np.full(256, _OTHER, np.uint8)
    for some, kind in ((fields, _FIELD), (spaces, _SPACE), (mark, _MARK)):
        table[list(some)] = kind
    return table


_PAIR_BYTES = _classes(b"0123456789.eE+-", b" \t", b":")
_INDEX_BYTES = _classes(b"0123456789", b"", b",")


@dataclass(frozen=True)
class _Fields:
    """Runs of field bytes: `text` [F] strings, `start` [F] and `lengths` [F] in the data, `first` int64 [B + 1] where
    each line's begin, `kind` [F] what stands before each (0 a line's start, else a class), `marks` how many of all."""

    text: pa.StringArray
    start: np.ndarray
    lengths: np.ndarray
    first: np.ndarray
    kind: np.ndarray
    marks: int


def _fields(data: np.ndarray, offsets: np.ndarray, classes: np.ndarray) -> _Fields | None:
    """The fields of lines; None where a byte belongs to no class."""
    kinds = classes[data]
    if kinds.max(initial=0) == _OTHER:
        return None
    breaks = np.flatnonzero(kinds)
    # Fields are what lies between breaks: those in the text, one byte wide, and the starts of lines, no byte wide.
    at = np.searchsorted(breaks, offsets[:-1])
    before = np.insert(breaks, at, offsets[:-1])
    start = np.insert(breaks + 1, at, offsets[:-1])
    kind = np.insert(kinds[breaks], at, 0)
    lengths = np.append(before[1:], len(data)) - start
    full = lengths > 0
    start, lengths, kind = start[full], lengths[full], kind[full]
    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data[kinds == _FIELD])]
    text = pa.Array.from_buffers(pa.string(), len(lengths), buffers)
    marks = int(np.count_nonzero(kinds == _MARK))
    return _Fields(text, start, lengths, np.searchsorted(start, offsets), kind, marks)


def _pairs(data: np.ndarray, offsets: np.ndarray) -> SparseRows | None:
    fields = _fields(data, offsets, _PAIR_BYTES)
    if fields is None or len(fields.kind) != 2 * fields.marks:
        return None
    of_value = fields.kind == _MARK
    if of_value[::2].any() or not of_value[1::2].all() or fields.lengths[::2].max(initial=0) > MAX_DIGITS:
        return None
    if (fields.start[::2] + fields.lengths[::2] + 1 != fields.start[1::2]).any():  # a space before the colon
        return None
    even = np.arange(0, len(fields.kind), 2)
    try:
        indices = fields.text.take(pa.array(even)).cast(pa.uint64())
        values = fields.text.take(pa.array(even + 1)).cast(pa.float32())
    except pa.ArrowInvalid:
        return None
    return SparseRows(indices.to_numpy().astype(np.int64), values.to_numpy(), fields.first // 2)


def _indices(data: np.ndarray, offsets: np.ndarray) -> SparseRows | None:
    fields = _fields(data, offsets, _INDEX_BYTES)
    if fields is None or (fields.kind == _SPACE).any() or fields.lengths.max(initial=0) > MAX_DIGITS:
        return None
    # A comma stands between two fields of a line, so there is one less of them than fields in each line that has any.
    if (
        fields.marks != np.count_nonzero(fields.kind == _MARK)
        or (fields.kind[fields.first[:-1][np.diff(fields.first) > 0]] == _MARK).any()
    ):
        return None
    indices = fields.text.cast(pa.uint64()).to_numpy().astype(np.int64)
    return SparseRows(indices, np.ones(len(indices), np.float32), fields.first)


def _wrong_pair(line: bytes) -> str | None:
    for field in line.replace(b"\t", b" ").split(b" "):
        if field and not _PAIR.fullmatch(field):
            return f"expected fields index:value such as 12:1.0, got {shown(field)}"
    return None


def _wrong_index(line: bytes) -> str | None:
    if not line:
        return None
    for field in line.split(b","):
        if not _INDEX.fullmatch(field):
            return f"expected labels such as 3,17,20, got {shown(field)}"
    return None


def whole_numbers(line: bytes) -> list[int]:
    """The whole numbers that spaces separate in `line`; none where anything else is in it."""
    fields = line.split()
    return [int(field) for field in fields] if all(_INDEX.fullmatch(field) for field in fields) else []


def shown(field: bytes) -> str:
    """`field`, cut short and safe to print."""
    return records.shown(field[:_SHOWN].decode("utf-8", "replace"))
