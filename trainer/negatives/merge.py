"""Labels of a batch, each once, and the place of every (query, label) pair's label: one pass through a hash table.

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
    `query` int32 [n], `place` int32 [n] in `ids`, `positive` bool [n]. `masked` int64: the pairs whose label is one of
    the pool's. `draws` int32 [n]: how often a query drew the pair for itself, 0 where it is one of its positives or
    hard negatives; empty where queries draw none.
    """

    ids: np.ndarray
    counts: np.ndarray
    query: np.ndarray
    place: np.ndarray
    positive: np.ndarray
    masked: np.ndarray
    draws: np.ndarray


class _Labels(NamedTuple):
    """Labels to merge: `merge`'s arguments, with no columns where there are none."""

    pool: np.ndarray
    positives: np.ndarray
    offsets: np.ndarray
    hard: np.ndarray
    query_draws: np.ndarray


def merge(
    pool: np.ndarray,
    positives: np.ndarray,
    offsets: np.ndarray,
    hard: np.ndarray | None,
    query_draws: np.ndarray | None = None,
) -> Merged:
    """Merge labels drawn for the pool [R], positives [P] of B queries (`offsets` [B + 1]) and their [B, H] hard ones.

    Labels drawn twice count twice. `query_draws` [B, k] are draws of single queries, after their hard negatives: one
    pair however often it is drawn, none where it is one of the query's others. Pads of `hard` and `query_draws` are
    left out. Raises ValueError over 2**24 pairs.
    """
    no_columns = np.empty((len(offsets) - 1, 0), np.int64)
    hard = no_columns.astype(positives.dtype) if hard is None else np.ascontiguousarray(hard)
    labels = _Labels(
        pool, positives, offsets, hard, no_columns if query_draws is None else np.ascontiguousarray(query_draws)
    )
    size = len(pool) + len(positives) + hard.size + labels.query_draws.size
    if size >= _LARGEST:
        raise ValueError(f"{size} labels in a batch, at most {_LARGEST - 1} can be merged: make the batch smaller")
    ids, counts = np.empty(size, np.int64), np.zeros(len(pool), np.int64)
    query, place = np.empty((2, size - len(pool)), np.int32)
    positive, masked = np.empty(len(query), np.bool_), np.empty(len(query), np.int64)
    draws, latest = np.zeros((2, 0 if query_draws is None else size), np.int32)
    merged = Merged(ids, counts, query, place, positive, masked, draws)
    lengths = _merge(labels, _table(size), merged, latest)
    return Merged(*(array[:length] for array, length in zip(merged, lengths, strict=True)))


def _table(size: int) -> np.ndarray:
    """Return this thread's hash table, a quarter full with `size` entries, uint32 [2^b]; its content has no meaning."""
    entries = 1 << max(4, (4 * size - 1).bit_length())  # half full, every third look-up meets another label first
    table: np.ndarray | None = getattr(_scratch, "table", None)
    if table is None or len(table) < entries:
        table = _scratch.table = np.empty(entries, np.uint32)
    return table[:entries]


@numba.njit(nogil=True, cache=True)
def _merge(
    labels: _Labels, table: np.ndarray, merged: Merged, latest: np.ndarray
) -> tuple[int, int, int, int, int, int, int]:
    """Write to the arrays of `merged`; return how much of each.

    `latest` is scratch: the last pair of each label, which says whether the query has the label already.
    """
    pool, positives, offsets, hard, query_draws = labels
    ids, counts, query, place, positive, masked, draws = merged
    table[:] = 0
    bits = 0
    while (1 << bits) < len(table):
        bits += 1
    count = 0
    for i in range(len(pool)):
        spot, count = _place(pool[i], table, bits, ids, count)
        counts[spot] += 1
    drawn = count
    pair = overlaps = 0
    latest[:] = -1
    for row in range(len(offsets) - 1):
        first = pair
        for i in range(offsets[row], offsets[row + 1]):
            place[pair], count = _place(positives[i], table, bits, ids, count)
            query[pair], positive[pair], masked[overlaps] = row, True, pair
            overlaps += place[pair] < drawn
            pair += 1
        for column in range(hard.shape[1]):
            label = hard[row, column]
            if label != PAD:
                place[pair], count = _place(label, table, bits, ids, count)
                query[pair], positive[pair], masked[overlaps] = row, False, pair
                overlaps += place[pair] < drawn
                pair += 1
        if query_draws.shape[1] == 0:
            continue
        for earlier in range(first, pair):
            latest[place[earlier]] = earlier
        for column in range(query_draws.shape[1]):
            label = query_draws[row, column]
            if label == PAD:
                continue
            spot, count = _place(label, table, bits, ids, count)
            before = latest[spot]
            if before < first:
                latest[spot], draws[pair] = pair, 1
                query[pair], place[pair], positive[pair], masked[overlaps] = row, spot, False, pair
                overlaps += spot < drawn
                pair += 1
            elif draws[before] > 0:
                draws[before] += 1
    return count, drawn, pair, pair, pair, overlaps, pair


@numba.njit(nogil=True, cache=True, inline="always")
def _place(label: int, table: np.ndarray, bits: int, ids: np.ndarray, count: int) -> tuple[int, int]:
    """Return the place of `label` in `ids` and how many there are, after adding it where it is new.

    An entry is its place + 1 in the low `bits`, and above them bits of the hash, so that few others are looked at.
    """
    hashed = np.uint64(label) * _GOLDEN
    slot = hashed >> np.uint64(64 - bits)
    low, mask = np.uint32((1 << bits) - 1), np.uint64(len(table) - 1)
    tag = np.uint32(hashed >> np.uint64(16)) & ~low
    while True:
        entry = table[slot]
        if entry == 0:
            table[slot] = tag | np.uint32(count + 1)
            ids[count] = label
            return count, count + 1
        if entry & ~low == tag and ids[(entry & low) - 1] == label:
            return int(entry & low) - 1, count
        slot = (slot + np.uint64(1)) & mask
