"""Labels of a batch, each once and ascending, and its pairs: sorted by label, each label's pairs lie side by side.

So what a query has twice is found without a look-up, and rows of millions are read in order. A pass of the sort takes
at most 11 of the labels' bits and goes through memory in order; a hash table, which this was, meets another place in
memory with every pair.
"""

from typing import NamedTuple

import numba
import numpy as np

from schemas.tables import PAD

NUMBER_BITS = 24  # of a pair's number, below its label's in one word
_DIGIT_BITS = 11  # sorted by in one pass, at most: as many places are written to side by side as a cache holds
_LARGEST = 1 << NUMBER_BITS
_MASK = np.uint64(_LARGEST - 1)


class Merged(NamedTuple):
    """Labels of a batch, `ids` int64 [C] ascending, and its pairs.

    Pairs are sorted by query, a query's positives before its hard negatives, and those before its draws: `query` int32
    [n], `place` int32 [n] in `ids`, `positive` bool [n]. `draws` int32 [n]: how often a query drew the pair, 0 where it
    is one of its positives or hard negatives.
    """

    ids: np.ndarray
    query: np.ndarray
    place: np.ndarray
    positive: np.ndarray
    draws: np.ndarray


def merge(
    positives: np.ndarray, offsets: np.ndarray, hard: np.ndarray | None, draws: np.ndarray | None = None
) -> Merged:
    """Merge positives [P] of B queries (`offsets` [B + 1]), their [B, H] hard negatives and their own `draws` [B, k].

    A draw is one pair however often the query drew it, and none where it is one of the query's others. Pads of `hard`
    and `draws` are left out. Labels are below 2**40. Raises ValueError over 2**24 pairs.
    """
    no_columns = np.empty((len(offsets) - 1, 0), positives.dtype)
    hard = no_columns if hard is None else np.ascontiguousarray(hard)
    draws = no_columns if draws is None else np.ascontiguousarray(draws)
    size = len(positives) + hard.size + draws.size
    if size >= _LARGEST:
        raise ValueError(f"{size} labels in a batch, at most {_LARGEST - 1} can be merged: make the batch smaller")
    words, ids, positive = np.empty((2, size), np.uint64), np.empty(size, np.int64), np.empty(size, bool)
    query, place, drawn = np.empty((3, size), np.int32)
    pairs = Merged(ids, query, place, positive, drawn)
    labels, kept = _merge(positives, offsets, hard, draws, words, pairs)
    return Merged(ids[:labels], query[:kept], place[:kept], positive[:kept], drawn[:kept])


@numba.njit(nogil=True, cache=True)
def _merge(positives, offsets, hard, draws, words, pairs):  # type: ignore[no-untyped-def]
    """Write to the arrays of `pairs`; return how many labels and how many pairs there are."""
    _, query, place, positive, drawn = pairs
    size = 0
    for row in range(len(offsets) - 1):
        first = size
        for i in range(offsets[row], offsets[row + 1]):
            words[0, size] = _word(positives[i], size)
            size += 1
        positive[first:size] = True
        others = size
        for column in range(hard.shape[1]):
            if hard[row, column] != PAD:
                words[0, size] = _word(hard[row, column], size)
                size += 1
        drawn[first:size] = 0
        own = size
        for column in range(draws.shape[1]):
            if draws[row, column] != PAD:
                words[0, size] = _word(draws[row, column], size)
                size += 1
        drawn[own:size] = 1
        positive[others:size] = False
        query[first:size] = row
    labels = _number(words[_sort(words, size), :size], pairs)
    kept = 0
    for i in range(size):
        if place[i] >= 0:
            query[kept], place[kept], positive[kept], drawn[kept] = query[i], place[i], positive[i], drawn[i]
            kept += 1
    return labels, kept


@numba.njit(nogil=True, cache=True)
def _word(label, number):  # type: ignore[no-untyped-def]
    return np.uint64(label) << np.uint64(NUMBER_BITS) | np.uint64(number)


@numba.njit(nogil=True, cache=True)
def _sort(words, size):  # type: ignore[no-untyped-def]
    """Sort words[0, :size] by label, those of one label in order; return the row of `words` that they end up in."""
    every = np.uint64(0)
    for i in range(size):
        every |= words[0, i]
    bits = 0
    while every >> np.uint64(NUMBER_BITS + bits):
        bits += 1
    passes = -(-bits // _DIGIT_BITS)
    width = -(-bits // max(passes, 1))
    last = np.uint64((1 << width) - 1)
    ends = np.empty(1 << width, np.int64)
    for number in range(passes):
        source, target = words[number % 2], words[(number + 1) % 2]
        shift = np.uint64(NUMBER_BITS + number * width)
        ends[:] = 0
        for i in range(size):
            ends[source[i] >> shift & last] += 1
        begin = 0
        for digit in range(len(ends)):
            begin, ends[digit] = begin + ends[digit], begin
        for i in range(size):
            digit = source[i] >> shift & last
            target[ends[digit]] = source[i]
            ends[digit] += 1
    return passes % 2


@numba.njit(nogil=True, cache=True)
def _number(words, pairs):  # type: ignore[no-untyped-def]
    """Number the labels of sorted `words`, and leave out what a query has already: its place is -1."""
    ids, query, place, _, drawn = pairs
    labels, before = 0, -1
    for i in range(len(words)):
        label, pair = np.int64(words[i] >> np.uint64(NUMBER_BITS)), np.int64(words[i] & _MASK)
        if labels == 0 or ids[labels - 1] != label:
            ids[labels] = label
            labels += 1
        elif drawn[pair] and query[pair] == query[before]:
            drawn[before] += drawn[before] > 0
            place[pair] = -1
            continue
        place[pair], before = labels - 1, pair
    return labels
