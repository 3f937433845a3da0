"""Parse lines of `index:value` fields, or of indices only, into ragged arrays without a loop over lines.

If a block contains a malformed line, a slow pass finds that line, and the fast pass parses the other lines. The result
for a valid line therefore does not depend on the other lines of the block.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats import records
from schemas.ragged import SparseRows, offsets_of
from schemas.shard_files import parquet

MAX_DIGITS = 18  # digits of an index that int64 can always hold
_SHOWN = 200
_FIELD, _SPACE, _MARK, _OTHER = 0, 1, 2, 3
_PAIR = re.compile(rb"[0-9]{1,18}:[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_INDEX = re.compile(rb"[0-9]{1,18}")


def parse_pairs(lines: pa.LargeBinaryArray) -> tuple[SparseRows, dict[int, str]]:
    """Parse lines [B] of `index:value` fields separated by spaces or tabs into (rows [B], errors of invalid lines).

    An invalid line becomes an empty row. The order and repetitions of entries within a row are preserved.
    """
    ragged, wrong = _parse(lines, _pairs, _wrong_pair)
    finite, beyond = only_finite(ragged)
    return finite, wrong | beyond


def parse_indices(lines: pa.LargeBinaryArray) -> tuple[SparseRows, dict[int, str]]:
    """Parse lines [B] of comma-separated indices into (rows [B] in which all values are 1, errors of invalid lines)."""
    return _parse(lines, _indices, _wrong_index)


def only_finite(ragged: SparseRows) -> tuple[SparseRows, dict[int, str]]:
    """Replace rows that contain a non-finite value with empty rows. Returns (rows, errors of invalid rows)."""
    finite = np.isfinite(ragged.values)
    if finite.all():
        return ragged, {}
    rows = ragged.row_of()
    wrong = np.unique(rows[~finite])
    kept = ragged.keep(~np.isin(rows, wrong))
    return kept, dict.fromkeys(wrong.tolist(), "a value does not fit into a 32-bit float")


def cut_at_space(lines: pa.LargeBinaryArray) -> tuple[pa.LargeBinaryArray, pa.LargeBinaryArray]:
    """Split each line [B] at its first space."""
    cut = pc.split_pattern(lines, " ", max_splits=1)
    first = cut.offsets[:-1]
    second = pc.if_else(pc.equal(cut.value_lengths(), 2), pc.add(first, 1), None)
    return cut.values.take(first), cut.values.take(second).fill_null(b"")


def sort_rows(ragged: SparseRows) -> SparseRows:
    """Return the rows sorted by index; entries with equal indices keep their order."""
    rows = ragged.row_of()
    if not len(rows) or not ((np.diff(ragged.ids) <= 0) & (rows[1:] == rows[:-1])).any():
        return ragged
    order = np.lexsort((ragged.ids, rows))
    return SparseRows(ragged.ids[order], ragged.values[order], ragged.offsets)


def merge_labels(ragged: SparseRows) -> tuple[SparseRows, np.ndarray]:
    """Return rows of distinct, sorted labels (values > 0), and the number of duplicates in each row, int32 [B]."""
    ragged = sort_rows(ragged.keep(ragged.values > 0))
    again = _again(ragged)
    merged = np.bincount(ragged.row_of()[again], minlength=ragged.rows).astype(np.int32)
    return ragged.keep(~again), merged


def unite_keys(keys: pa.StringArray, offsets: np.ndarray) -> tuple[pa.ListArray, pa.Array]:
    """Return the columns label_keys and merged for rows with label keys `keys` [V]; row i starts at `offsets[i]`."""
    coded = keys.dictionary_encode()
    order = pc.sort_indices(coded.dictionary)
    rank = np.argsort(order.to_numpy())
    once, merged = merge_labels(SparseRows(rank[coded.indices], np.ones(len(coded), np.float32), offsets))
    named = coded.dictionary.take(order).take(pa.array(once.ids))
    return pa.ListArray.from_arrays(pa.array(once.offsets.astype(np.int32)), named), pa.array(merged)


def merge_features(ragged: SparseRows) -> SparseRows:
    """Return rows of distinct, sorted features; the values of a repeated feature are summed in order."""
    ragged = sort_rows(ragged)
    again = _again(ragged)
    if not again.any():
        return ragged
    first = np.flatnonzero(~again)
    sums = np.add.reduceat(ragged.values.astype(np.float64), first)
    limit = np.finfo(np.float32).max
    once = ragged.keep(~again)
    return once._replace(values=np.clip(sums, -limit, limit).astype(np.float32))


def feature_columns(ragged: SparseRows) -> list[pa.Array]:
    """Return the columns feature_ids and feature_values for rows of features."""
    merged = merge_features(ragged)
    return [
        parquet.list_array(merged.ids.astype(np.int32), merged.offsets, pa.int32()),
        parquet.list_array(merged.values, merged.offsets, pa.float32()),
    ]


MOST_FLOAT16 = float(np.finfo(np.float16).max)  # largest number in a dense vector
WRONG_LENGTH = "{} has {:,} numbers, expected {:,} as in the other rows"
NOT_FLOAT16 = "{} contains a value that a finite 16-bit float cannot hold"


def vector_column(vectors: np.ndarray) -> pa.FixedSizeListArray:
    """Return dense vectors [B, d] as a column; numbers above MOST_FLOAT16, which are in rejected rows, become zeros."""
    kept = np.where(np.abs(vectors) <= MOST_FLOAT16, vectors, 0).astype(np.float16)
    return parquet.matrix_array(kept, pa.float16())


def _again(ragged: SparseRows) -> np.ndarray:
    """Mark the entries [V] of sorted rows that have the same index as the previous entry in the same row."""
    again = np.zeros(len(ragged.ids), bool)
    rows = ragged.row_of()
    again[1:] = (ragged.ids[1:] == ragged.ids[:-1]) & (rows[1:] == rows[:-1])
    return again


def _parse(
    lines: pa.LargeBinaryArray,
    fast: Callable[[np.ndarray, np.ndarray], SparseRows | None],
    find_fault: Callable[[bytes], str | None],
) -> tuple[SparseRows, dict[int, str]]:
    ragged = fast(*parquet.string_bytes(lines))
    if ragged is not None:
        return ragged, {}
    each = lines.to_pylist()
    wrong = {row: detail for row, line in enumerate(each) if (detail := find_fault(line)) is not None}
    for row in wrong:
        each[row] = b""
    ragged = fast(*parquet.string_bytes(pa.array(each, pa.large_binary())))
    assert ragged is not None, "the fast pass reads every line that the slow pass accepts"
    return ragged, wrong


def _classes(fields: bytes, spaces: bytes, mark: bytes) -> np.ndarray:
    table = np.full(256, _OTHER, np.uint8)
    for some, kind in ((fields, _FIELD), (spaces, _SPACE), (mark, _MARK)):
        table[list(some)] = kind
    return table


_PAIR_BYTES = _classes(b"0123456789.eE+-", b" \t", b":")
_INDEX_BYTES = _classes(b"0123456789", b"", b",")


@dataclass(frozen=True)
class _Fields:
    """Fields of lines; a field is a run of consecutive field bytes.

    `text` [F]: fields as strings. `start` [F] and `lengths` [F]: positions in the data. `first` int64 [B + 1]: first
    field of each line. `kind` [F]: class of the byte before each field (0 at the start of a line). `marks`: number of
    colons or commas.
    """

    text: pa.StringArray
    start: np.ndarray
    lengths: np.ndarray
    first: np.ndarray
    kind: np.ndarray
    marks: int


def _fields(data: np.ndarray, offsets: np.ndarray, classes: np.ndarray) -> _Fields | None:
    """Find the fields of lines; None if a byte does not belong to any class."""
    kinds = classes[data]
    if kinds.max(initial=0) == _OTHER:
        return None
    breaks = np.flatnonzero(kinds)
    # Fields are between breaks. A break is a separator in the text (one byte), or the start of a line (zero bytes).
    places = np.searchsorted(breaks, offsets[:-1])
    before = np.insert(breaks, places, offsets[:-1])
    start = np.insert(breaks + 1, places, offsets[:-1])
    kind = np.insert(kinds[breaks], places, 0)
    lengths = np.append(before[1:], len(data)) - start
    full = lengths > 0
    start, lengths, kind = start[full], lengths[full], kind[full]
    buffers = [None, pa.py_buffer(offsets_of(lengths).astype(np.int32)), pa.py_buffer(data[kinds == _FIELD])]
    text = pa.Array.from_buffers(pa.string(), len(lengths), buffers)
    marks = int(np.count_nonzero(kinds == _MARK))
    return _Fields(text, start, lengths, np.searchsorted(start, offsets), kind, marks)


def _pairs(data: np.ndarray, offsets: np.ndarray) -> SparseRows | None:
    fields = _fields(data, offsets, _PAIR_BYTES)
    if fields is None or len(fields.kind) != 2 * fields.marks or (fields.first % 2).any():  # a line has half a pair
        return None
    of_value = fields.kind == _MARK
    if of_value[::2].any() or not of_value[1::2].all() or fields.lengths[::2].max(initial=0) > MAX_DIGITS:
        return None
    if (fields.start[::2] + fields.lengths[::2] + 1 != fields.start[1::2]).any():  # there is a space before the colon
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
    # A comma separates two fields of a line, so each non-empty line has one comma fewer than fields.
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
    """Parse the space-separated whole numbers in `line`; empty if `line` contains anything else."""
    fields = line.split()
    return [int(field) for field in fields] if all(_INDEX.fullmatch(field) for field in fields) else []


def shown(field: bytes) -> str:
    """Return `field` as text that is safe to print and truncated."""
    return records.shown(field[:_SHOWN].decode("utf-8", "replace"))
