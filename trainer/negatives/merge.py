"""The labels of a batch, each once, and where every (query, label) pair finds its own: one pass through a hash table.

NumPy does it with a sort and a dozen passes over the pairs, in four times the time; it is what the tests compare with.
"""

import threading
from typing import NamedTuple

import numba
import numpy as np

from schemas.tables import PAD

_LARGEST = 1 << 24
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Fibonacci hashing spreads neighbouring ids
_scratch = threading.local()


class Merged(NamedTuple):
    """Labels of a batch and its pairs.

    `ids` int64 [C]: the pool's labels first, then the others, as they come up; `counts` int64 [R'] says how often each
    of the pool's was drawn. Pairs are sorted by query, a query's positives before its hard negatives:
    `query` int32 [n], `place` int32 [n] in `ids`, `positive` bool [n]. `struck` int64: the pairs whose label is one of
    the pool's. `draws` int32 [n]: how often a query drew the pair for itself, 0 where it is one of its positives or
    hard negatives; empty where queries draw none.
    """

    ids: np.ndarray
    counts: np.ndarray
    query: np.ndarray
    place: np.ndarray
    positive: np.ndarray
    struck: np.ndarray
    draws: np.ndarray


def merge(
    pool: np.ndarray,
    positives: np.ndarray,
    offsets: np.ndarray,
    hard: np.ndarray | None,
    own: np.ndarray | None = None,
) -> Merged:
    """The labels drawn for the pool [R], and the positives [P] of B queries (`offsets` [B + 1]) and their [B, H] hard.

    Labels drawn twice count twice. `own` [B, k], where given, are draws of each query's own, after its hard negatives:
    one pair however often it is drawn, none where it is one of the query's others. Pads of `hard` and `own` are left
    out. Raises ValueError over 2**24 pairs.
    """
    rows = len(offsets) - 1
    hard = np.empty((rows, 0), positives.dtype) if hard is None else np.ascontiguousarray(hard)
    drawn_by = np.empty((rows, 0), np.int64) if own is None else np.ascontiguousarray(own)
    size = len(pool) + len(positives) + hard.size + drawn_by.size
    if size >= _LARGEST:
        raise ValueError(f"{size} labels in a batch, at most {_LARGEST - 1} can be merged: make the batch smaller")
    ids, counts = np.empty(size, np.int64), np.zeros(len(pool), np.int64)
    query, place = np.empty((2, size - len(pool)), np.int32)
    positive, struck = np.empty(len(query), np.bool_), np.empty(len(query), np.int64)
    draws, latest = np.zeros((2, 0 if own is None else size), np.int32)
    found = (ids, counts, query, place, positive, struck, draws, latest)
    count, drawn, pairs, both = _merge(pool, positives, offsets, hard, drawn_by, _table(size), *found)
    of_pairs = query[:pairs], place[:pairs], positive[:pairs]
    return Merged(ids[:count], counts[:drawn], *of_pairs, struck[:both], draws[:pairs])


def _table(size: int) -> np.ndarray:
    """This thread's hash table, a quarter full with `size` entries, uint32 [2^b]; its content is of no account."""
    entries = 1 << max(4, (4 * size - 1).bit_length())  # half full, every third look-up meets another label first
    table: np.ndarray | None = getattr(_scratch, "table", None)
    if table is None or len(table) < entries:
        table = _scratch.table = np.empty(entries, np.uint32)
    return table[:entries]


@numba.njit(nogil=True, cache=True)
def _merge(
    pool: np.ndarray,
    positives: np.ndarray,
    offsets: np.ndarray,
    hard: np.ndarray,
    own: np.ndarray,
    table: np.ndarray,
    ids: np.ndarray,
    counts: np.ndarray,
    query: np.ndarray,
    place: np.ndarray,
    positive: np.ndarray,
    struck: np.ndarray,
    draws: np.ndarray,
    latest: np.ndarray,
) -> tuple[int, int, int, int]:
    """(labels, those of the pool, pairs, those struck), written to `ids`, `counts`, `query` and what follows.

    `latest` is scratch: the last pair of each label, which says whether the query has the label already.
    """
    table[:] = 0
    bits = 0
    while (1 << bits) < len(table):
        bits += 1
    count = 0
    for i in range(len(pool)):
        at, count = _place(pool[i], table, bits, ids, count)
        counts[at] += 1
    drawn = count
    pair = both = 0
    width = hard.shape[1]
    latest[:] = -1
    for row in range(len(offsets) - 1):
        first = pair
        for i in range(offsets[row], offsets[row + 1]):
            place[pair], count = _place(positives[i], table, bits, ids, count)
            query[pair], positive[pair], struck[both] = row, True, pair
            both += place[pair] < drawn
            pair += 1
        for column in range(width):
            label = hard[row, column]
            if label != PAD:
                place[pair], count = _place(label, table, bits, ids, count)
                query[pair], positive[pair], struck[both] = row, False, pair
                both += place[pair] < drawn
                pair += 1
        if own.shape[1] == 0:
            continue
        for known in range(first, pair):
            latest[place[known]] = known
        for column in range(own.shape[1]):
            label = own[row, column]
            if label == PAD:
                continue
            at, count = _place(label, table, bits, ids, count)
            before = latest[at]
            if before < first:
                latest[at], draws[pair] = pair, 1
                query[pair], place[pair], positive[pair], struck[both] = row, at, False, pair
                both += at < drawn
                pair += 1
            elif draws[before] > 0:
                draws[before] += 1
    return count, drawn, pair, both


@numba.njit(nogil=True, cache=True, inline="always")
def _place(label: int, table: np.ndarray, bits: int, ids: np.ndarray, count: int) -> tuple[int, int]:
    """(place of `label` in `ids`, how many there are), after adding it where it is new.

    An entry is its place + 1 in the low `bits`, and above them bits of the hash, so that few others are looked at.
    """
    hashed = np.uint64(label) * _GOLDEN
    at = hashed >> np.uint64(64 - bits)
    low, mask = np.uint32((1 << bits) - 1), np.uint64(len(table) - 1)
    tag = np.uint32(hashed >> np.uint64(16)) & ~low
    while True:
        entry = table[at]
        if entry == 0:
            table[at] = tag | np.uint32(count + 1)
            ids[count] = label
            return count, count + 1
        if entry & ~low == tag and ids[(entry & low) - 1] == label:
            return int(entry & low) - 1, count
        at = (at + np.uint64(1)) & mask
