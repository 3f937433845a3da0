"""Labels of a batch, each once and ascending, and its pairs: sorted by label, each label's pairs lie side by side.

So what a query has twice is found without a look-up, and rows of millions are read in order. A pass of the sort takes
at most 11 of the labels' bits and goes through memory in order; a hash table or a bitmap meets another place in memory
with every pair, and takes as long or longer (docs/decisions/0028). Loops have no branch that random labels decide: one
that goes either way costs more than all else that is done with a pair.
"""

from typing import NamedTuple

import numba
import numpy as np

from schemas.tables import PAD

NUMBER_BITS = 24  # of a pair's number, below its label's in one word
_DIGIT_BITS = 11  # sorted by in one pass, at most: as many places are written to side by side as a cache holds
_LARGEST = 1 << NUMBER_BITS
_MASK = np.uint64(_LARGEST - 1)
_SHIFT = np.uint64(NUMBER_BITS)
_ONE = np.uint32(1)


class Merged(NamedTuple):
    """Labels of a batch, `ids` int64 [C], and its pairs.

    Pairs are sorted by query, a query's positives before its hard negatives, and those before its draws: `query` int32
    [n], `place` int32 [n] in `ids`, `positive` bool [n], `weight` float32 [n].
    """

    ids: np.ndarray
    query: np.ndarray
    place: np.ndarray
    positive: np.ndarray
    weight: np.ndarray


class MergedWithPool(NamedTuple):
    """The same with a pool for all queries: its R labels come first in `ids`, and ascend by themselves.

    `pool_weight` float32 [R]: what each counts. Pairs whose label is in the pool, too, are in `masked_query` and
    `masked_pool`, int32 [m]. Every pair weighs 1.
    """

    ids: np.ndarray
    query: np.ndarray
    place: np.ndarray
    positive: np.ndarray
    weight: np.ndarray
    pool_weight: np.ndarray
    masked_query: np.ndarray
    masked_pool: np.ndarray


def merge(
    positives: np.ndarray,
    offsets: np.ndarray,
    hard: np.ndarray | None,
    draws: np.ndarray | None = None,
    weight: float = 1.0,
    weight_of_others: float = 1.0,
) -> Merged:
    """Merge positives [P] of B queries (`offsets` [B + 1]), their [B, H] hard negatives and their own `draws` [B, k].

    A draw is one pair however often the query drew it, and none where it is one of the query's others. It weighs
    `weight` as often as it was drawn, a positive or hard negative `weight_of_others`. Pads of `hard` and `draws` are
    left out. Labels ascend, and are below 2**40. Raises ValueError over 2**24 pairs.
    """
    queries, size = _queries(positives, offsets, hard, draws, None)
    ids, (query, place), positive = np.empty(size, np.int64), np.empty((2, size), np.int32), np.empty(size, bool)
    pairs = Merged(ids, query, place, positive, np.empty(size, np.float32))
    laid = np.empty(size, np.int32), np.empty(size, np.float32)
    labels, kept = _merge(queries, _scratch(queries, size), laid, (float(weight), float(weight_of_others)), pairs)
    return Merged(ids[:labels], *(column[:kept] for column in pairs[1:]))


def merge_with_pool(
    positives: np.ndarray, offsets: np.ndarray, hard: np.ndarray | None, pool: np.ndarray, weight: float
) -> MergedWithPool:
    """Merge as `merge` does, with the draws `pool` [k] that all queries share, each of which counts `weight`."""
    queries, size = _queries(positives, offsets, hard, None, pool)
    ids, (query, place, masked_query, masked_pool) = np.empty(size, np.int64), np.empty((4, size), np.int32)
    positive, ones, pool_weight = np.empty(size, bool), np.empty(size, np.float32), np.zeros(len(pool), np.float32)
    pairs = MergedWithPool(ids, query, place, positive, ones, pool_weight, masked_query, masked_pool)
    labels, kept, drawn, met = _merge_with_pool(queries, _scratch(queries, size), float(weight), pairs)
    stops = labels, kept, kept, kept, kept, drawn, met, met
    return MergedWithPool(*(column[:stop] for column, stop in zip(pairs, stops, strict=True)))


def _queries(
    positives: np.ndarray,
    offsets: np.ndarray,
    hard: np.ndarray | None,
    draws: np.ndarray | None,
    pool: np.ndarray | None,
) -> tuple[tuple[np.ndarray, ...], int]:
    """Return the arrays of a batch, int32 where all of them are, and how many labels they hold. Raises ValueError."""
    parts = (labels for labels in (positives, hard, draws, pool) if labels is not None)
    kind = np.int32 if all(labels.dtype == np.int32 for labels in parts) else np.int64
    none = np.empty((len(offsets) - 1, 0), kind)
    hard, draws = (none if labels is None else np.ascontiguousarray(labels, kind) for labels in (hard, draws))
    pool = np.empty(0, kind) if pool is None else pool.astype(kind, copy=False)
    size = len(positives) + hard.size + draws.size + len(pool)
    if size >= _LARGEST:
        raise ValueError(f"{size} labels in a batch, at most {_LARGEST - 1} can be merged: make the batch smaller")
    bounds = np.ascontiguousarray(offsets, np.int64)
    return (positives.astype(kind, copy=False), bounds, hard, draws, pool), size


def _scratch(queries: tuple[np.ndarray, ...], size: int) -> tuple[np.ndarray, ...]:
    """Return memory for labels that lie side by side, and twice for words."""
    return np.empty(size, queries[0].dtype), np.empty(size, np.uint64), np.empty(size, np.uint64)


@numba.njit(nogil=True, cache=True)
def _merge(queries, scratch, laid, weights, pairs):  # type: ignore[no-untyped-def]
    """Write to the arrays of `pairs`; return how many labels and how many pairs there are."""
    place, times = laid
    starts, draws_from = _lay_out(queries, scratch[0])
    size = starts[-1]
    for row in range(len(draws_from)):
        times[starts[row] : draws_from[row]] = 0
        times[draws_from[row] : starts[row + 1]] = 1
    words, others = _sorted(scratch, size)
    # `others` takes the draws to leave out: a few, or nearly as many as there are words.
    labels, dropped = _number(words, starts, draws_from, pairs.ids, place, times, others)
    _fill(place[:size], times, weights, others[:dropped], pairs)
    _fill_rows(starts, queries[1], others[:dropped], pairs.query, pairs.positive)
    return labels, size - dropped


@numba.njit(nogil=True, cache=True)
def _merge_with_pool(queries, scratch, weight, pairs):  # type: ignore[no-untyped-def]
    """Write to the arrays of `pairs`; return how many labels, pairs, labels of the pool and masked pairs there are."""
    starts, _ = _lay_out(queries, scratch[0])
    size, pool = starts[-1], queries[4]
    scratch[0][size : size + len(pool)] = pool
    words, others = _sorted(scratch, size + len(pool))
    labels, drawn = _number_with_pool(words, np.uint64(size), pairs.ids, pairs.place, pairs.pool_weight)
    for i in range(drawn):
        pairs.pool_weight[i] = np.float32(pairs.pool_weight[i] * weight)
    pairs.weight[:size] = 1
    _fill_rows(starts, queries[1], others[:0], pairs.query, pairs.positive)
    met = 0
    for pair in range(size):
        if pairs.place[pair] < drawn:
            pairs.masked_query[met], pairs.masked_pool[met] = pairs.query[pair], pairs.place[pair]
            met += 1
    return labels, size, drawn, met


@numba.njit(nogil=True, cache=True)
def _lay_out(queries, label):  # type: ignore[no-untyped-def]
    """Lay labels side by side by query; return where each query's begin [B + 1], and where its draws do [B]."""
    positives, offsets, hard, draws, _ = queries
    starts, draws_from = np.zeros(len(offsets), np.int64), np.empty(len(offsets) - 1, np.int64)
    size = 0
    for row in range(len(draws_from)):
        for i in range(offsets[row], offsets[row + 1]):
            label[size] = positives[i]
            size += 1
        for column in range(hard.shape[1]):
            label[size] = hard[row, column]
            size += hard[row, column] != PAD
        draws_from[row] = size
        for column in range(draws.shape[1]):
            label[size] = draws[row, column]
            size += draws[row, column] != PAD
        starts[row + 1] = size
    return starts, draws_from


@numba.njit(nogil=True, cache=True)
def _sorted(scratch, size):  # type: ignore[no-untyped-def]
    """Sort the labels of scratch; return their words [size], and the memory that is left over."""
    label, words, others = scratch
    if _sort(label[:size], words, others):
        return others[:size], words
    return words[:size], others


@numba.njit(nogil=True, cache=True)
def _sort(label, words, others):  # type: ignore[no-untyped-def]
    """Sort words of (label, number) by label, those of one label in order; return whether they end up in `others`."""
    every = np.int64(0)
    for value in label:
        every |= np.int64(value)
    bits = 0
    while every >> bits:
        bits += 1
    passes = max(1, -(-bits // _DIGIT_BITS))
    width = -(-bits // passes)
    last = np.uint64((1 << width) - 1)
    ends = np.empty(1 << width, np.uint32)  # unsigned, as all that is counted here: no test for an index below 0
    for number in range(passes):
        shift = np.uint64(number * width)
        ends[:] = 0
        for value in label:
            ends[np.uint64(value) >> shift & last] += _ONE
        begin = np.uint32(0)
        for digit in range(len(ends)):
            begin, ends[digit] = begin + ends[digit], begin
        if number == 0:
            _deal(label, words, ends, last)
        elif number % 2:
            _deal_words(words[: len(label)], others, ends, _SHIFT + shift, last)
        else:
            _deal_words(others[: len(label)], words, ends, _SHIFT + shift, last)
    return passes % 2 == 0


@numba.njit(nogil=True, cache=True)
def _deal(label, target, ends, last):  # type: ignore[no-untyped-def]
    """Write words of labels and their numbers to where the labels' last digit says."""
    for number in range(len(label)):
        value = np.uint64(label[number])
        end = ends[value & last]
        target[end] = value << _SHIFT | np.uint64(number)
        ends[value & last] = end + _ONE


@numba.njit(nogil=True, cache=True)
def _deal_words(source, target, ends, shift, last):  # type: ignore[no-untyped-def]
    """Write words to where the digit above `shift` says."""
    for word in source:
        digit = word >> shift & last
        end = ends[digit]
        target[end] = word
        ends[digit] = end + _ONE


@numba.njit(nogil=True, cache=True)
def _number(words, starts, draws_from, ids, place, times, dropped):  # type: ignore[no-untyped-def]
    """Number the labels of sorted `words`; return how many there are, and how many draws are `dropped`.

    Those are draws that their query has already; it drew a draw before them once more.
    """
    longest, count = np.uint64(0), 0
    for row in range(len(draws_from)):
        longest = max(longest, np.uint64(starts[row + 1] - starts[row]))
    label, rank, before = np.uint64(2**64 - 1), np.uint64(2**64 - 1), np.uint64(0)
    for word in words:
        pair, is_new = word & _MASK, np.uint64(word >> _SHIFT != label)
        label = word >> _SHIFT
        rank += is_new
        ids[rank] = np.int64(label)
        place[pair] = np.int32(rank)
        if pair - before | is_new << _SHIFT < longest:  # the label is the one before's, and both may be of one query
            row = np.searchsorted(starts, np.int64(pair), side="right") - 1
            if np.int64(before) >= starts[row] and np.int64(pair) >= draws_from[row]:
                times[before] += times[before] > 0
                dropped[count] = pair
                count += 1
                continue
        before = pair
    dropped[:count].sort()
    return np.int64(rank + np.uint64(1)), count


@numba.njit(nogil=True, cache=True)
def _fill(place, times, weights, dropped, pairs):  # type: ignore[no-untyped-def]
    """Write places and weights of all pairs that are not `dropped`."""
    start, kept = np.int64(0), np.int64(0)
    for number in range(len(dropped) + 1):
        stop = np.int64(dropped[number]) if number < len(dropped) else len(place)
        moved, weight, drawn = pairs.place[kept:], pairs.weight[kept:], times[start:stop]
        moved[: stop - start] = place[start:stop]
        for i in range(len(drawn)):
            weight[i] = np.float32(drawn[i] * weights[0]) if drawn[i] else np.float32(weights[1])
        kept, start = kept + stop - start, stop + 1


@numba.njit(nogil=True, cache=True)
def _fill_rows(starts, offsets, dropped, query, positive):  # type: ignore[no-untyped-def]
    """Write query and kind of all pairs that are not `dropped`."""
    begin, gone = 0, 0
    for row in range(len(offsets) - 1):
        while gone < len(dropped) and np.int64(dropped[gone]) < starts[row + 1]:
            gone += 1
        end, others = starts[row + 1] - gone, begin + offsets[row + 1] - offsets[row]
        query[begin:end] = row
        positive[begin:others] = True
        positive[others:end] = False
        begin = end


@numba.njit(nogil=True, cache=True)
def _number_with_pool(words, pairs, ids, place, times):  # type: ignore[no-untyped-def]
    """Number the labels of sorted `words`, those of the pool first; return how many there are, and how many of these.

    The draws of the pool have the numbers from `pairs` on, so that they come last of a label's: seen from the end, the
    first word of a label tells whether the pool has it.
    """
    size, zero = len(words), np.uint64(0)
    other, first = np.uint64(size > 0), np.uint64(size > 0 and words[-1] & _MASK >= pairs)
    for i in range(size - 1):
        is_last = np.uint64(words[i] >> _SHIFT != words[i + 1] >> _SHIFT)
        other += is_last
        first += is_last & np.uint64(words[i] & _MASK >= pairs)
    labels, drawn, rank, after = np.int64(other), np.int64(first), zero, np.uint64(2**64 - 1)
    for i in range(size):
        word = words[size - 1 - i]
        is_new, is_drawn = np.uint64(word >> _SHIFT != after), np.uint64(word & _MASK >= pairs)
        after = word >> _SHIFT
        first -= is_new & is_drawn
        other -= is_new & ~is_drawn
        rank = (first if is_drawn else other) if is_new else rank
        ids[rank] = np.int64(after)
        place[word & _MASK] = np.int32(rank)
    for i in range(size - np.int64(pairs)):
        times[np.uint64(place[pairs + np.uint64(i)])] += 1
    return labels, drawn
