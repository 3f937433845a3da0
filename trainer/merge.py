"""The labels of a batch, each once, and where every (query, label) pair finds its own: one pass through a hash table.

NumPy does it with a sort and a dozen passes over the pairs, in four times the time; it is what the tests compare with.
"""

import threading
from typing import NamedTuple

import numba
import numpy as np

from schemas.tables import PAD

_PLACE_BITS = 24  # of a table's entry; the label has the rest
_PLACES = 1 << _PLACE_BITS
_LABELS = 1 << (63 - _PLACE_BITS)
_EMPTY = -1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing spreads neighbouring ids
_scratch = threading.local()


class Merged(NamedTuple):
    """Labels of a batch and its pairs.

    `ids` int64 [C]: the pool's labels first, then the others as they come up. Pairs are sorted by query, a query's
    positives before its hard negatives: `query` int64 [n], `place` int64 [n] in `ids`, `positive` bool [n].
    """

    ids: np.ndarray
    query: np.ndarray
    place: np.ndarray
    positive: np.ndarray


def merge(pool: np.ndarray, positives: np.ndarray, offsets: np.ndarray, hard: np.ndarray | None) -> Merged:
    """The pool's labels int64 [R], each once, with the positives [P] of B queries (`offsets` [B + 1]) and [B, H] hard.

    Pads of `hard` are left out. Raises ValueError over 2**24 pairs or a label of 2**39 or more.
    """
    if hard is None:
        hard = np.empty((len(offsets) - 1, 0), positives.dtype)
    size = len(pool) + len(positives) + hard.size
    if size >= _PLACES:
        raise ValueError(f"{size} labels in a batch, at most {_PLACES - 1} can be merged: make the batch smaller")
    ids = np.empty(size, np.int64)
    query, place = np.empty((2, size - len(pool)), np.int64)
    positive = np.empty(len(query), np.bool_)
    count, pairs = _merge(
        pool, positives, offsets, np.ascontiguousarray(hard), _table(size), ids, query, place, positive
    )
    if count < 0:
        raise ValueError(f"label {-count}: at most {_LABELS - 1} can be merged")
    return Merged(ids[:count], query[:pairs], place[:pairs], positive[:pairs])


def _table(size: int) -> np.ndarray:
    """This thread's hash table, at most half full with `size` entries, int64 [2^b]; its content is of no account."""
    entries = 1 << max(4, (2 * size - 1).bit_length())
    table: np.ndarray | None = getattr(_scratch, "table", None)
    if table is None or len(table) < entries:
        table = _scratch.table = np.empty(entries, np.int64)
    return table[:entries]


@numba.njit(nogil=True, cache=True)
def _merge(
    pool: np.ndarray,
    positives: np.ndarray,
    offsets: np.ndarray,
    hard: np.ndarray,
    table: np.ndarray,
    ids: np.ndarray,
    query: np.ndarray,
    place: np.ndarray,
    positive: np.ndarray,
) -> tuple[int, int]:
    """(labels, pairs) written to `ids`, `query`, `place` and `positive`."""
    table[:] = _EMPTY
    bits = 0
    while (1 << bits) < len(table):
        bits += 1
    shift, mask = np.uint64(64 - bits), np.uint64(len(table) - 1)
    count = 0
    for i in range(len(pool)):
        label = int(pool[i])
        if label >= _LABELS:
            return -label, 0
        count = _place(label, table, shift, mask, ids, count)[1]
    pair = 0
    width = hard.shape[1]
    for row in range(len(offsets) - 1):
        for i in range(offsets[row], offsets[row + 1]):
            label = int(positives[i])
            if label >= _LABELS:
                return -label, 0
            place[pair], count = _place(label, table, shift, mask, ids, count)
            query[pair], positive[pair] = row, True
            pair += 1
        for column in range(width):
            label = int(hard[row, column])
            if label == PAD:
                continue
            if label >= _LABELS:
                return -label, 0
            place[pair], count = _place(label, table, shift, mask, ids, count)
            query[pair], positive[pair] = row, False
            pair += 1
    return count, pair


@numba.njit(nogil=True, cache=True, inline="always")
def _place(
    label: int, table: np.ndarray, shift: np.uint64, mask: np.uint64, ids: np.ndarray, count: int
) -> tuple[int, int]:
    """(place of `label` in `ids`, how many there are), after adding it where it is new."""
    at = (np.uint64(label) * _GOLDEN) >> shift
    while True:
        entry = table[at]
        if entry == _EMPTY:
            table[at] = (label << _PLACE_BITS) | count
            ids[count] = label
            return count, count + 1
        if entry >> _PLACE_BITS == label:
            return entry & (_PLACES - 1), count
        at = (at + np.uint64(1)) & mask
