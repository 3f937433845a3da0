"""Find the distinct labels of a batch, ascending, and the position of each pair's label in this list.

The method depends on the sizes. With few labels per pair, a bitmap over all labels is used: a label's position is the
number of set bits before the label's bit. Otherwise pairs are sorted by label, with at most 11 bits in each pass over
memory. A bitmap reads one word per 64 labels; sorting makes a few passes over the pairs. Loops do not branch on random
labels, because an unpredictable branch costs more than all other work on a pair.
"""

import numba
import numpy as np

from schemas import PAD
from schemas.ragged import Ragged
from trainer.negatives.draws import popcount
from trainer.stream.batch import Candidates, DrawnLabels

NUMBER_BITS = 24  # bits of a pair's number, below the bits of its label in one word
_DIGIT_BITS = 11  # maximum bits per sorting pass: the places that one pass writes to fit in a cache
_LARGEST = 1 << NUMBER_BITS
_MASK = np.uint64(_LARGEST - 1)
_SHIFT = np.uint64(NUMBER_BITS)
_ONE = np.uint32(1)
_SPARSE = 64  # labels per pair up to which a bitmap is faster, measured with 30,000 and 260,000 pairs
_NONE = np.empty(0, np.int32)
_WORD, _BIT, _LOW = np.uint64(6), np.uint64(1), np.uint64(63)  # a label's word is label >> 6
# Labels of B queries: a matrix [B, K] or rows of any length, with padding; or None.
LabelLists = np.ndarray | Ragged | None


def merge(
    positives: np.ndarray,
    offsets: np.ndarray,
    hard: LabelLists,
    draws: LabelLists = None,
    weight: float = 1.0,
    weight_of_others: float = 1.0,
) -> Candidates:
    """Merge the positives [P] of B queries (`offsets` [B + 1]), their hard negatives and their own `draws`.

    A label that a query draws repeatedly becomes one pair, and `weight` is multiplied by the number of draws. The pair
    is dropped if its label is already a positive or a hard negative of the query. A positive or hard negative has the
    weight `weight_of_others`. Padding in `hard` and `draws` is ignored. Labels are in ascending order and below 2**40;
    a query's positives come first, then its hard negatives, then its draws. Raises ValueError for more than 2**24
    pairs.
    """
    queries, size = _queries(positives, offsets, hard, draws, None)
    ids, (query, place), positive = np.empty(size, np.int64), np.empty((2, size), np.int32), np.empty(size, bool)
    pairs = Candidates(ids, query, place, positive, np.empty(size, np.float32))
    labels, kept = _merge(queries, (float(weight), float(weight_of_others)), pairs)
    return Candidates(ids[:labels], query[:kept], place[:kept], positive[:kept], pairs.pair_weight[:kept])


def merge_with_pool(
    positives: np.ndarray, offsets: np.ndarray, hard: LabelLists, pool: np.ndarray, weight: float
) -> Candidates:
    """Merge like `merge`, but with one `pool` [k] of draws, each of `weight`, for all queries; every pair weighs 1."""
    queries, size = _queries(positives, offsets, hard, None, pool)
    ids, (query, place, masked_query, masked_pool) = np.empty(size, np.int64), np.empty((4, size), np.int32)
    positive, ones, pool_weight = np.empty(size, bool), np.empty(size, np.float32), np.zeros(len(pool), np.float32)
    pairs = Candidates(ids, query, place, positive, ones, pool_weight, masked_query, masked_pool)
    labels, kept, drawn, met = _merge_with_pool(queries, float(weight), pairs)
    columns = ids[:labels], query[:kept], place[:kept], positive[:kept], ones[:kept]
    return Candidates(*columns, pool_weight[:drawn], masked_query[:met], masked_pool[:met])


def concatenate_labels(
    positives: np.ndarray,
    offsets: np.ndarray,
    hard: LabelLists,
    draws: LabelLists,
    weight: float = 1.0,
    with_pads: bool = False,
) -> DrawnLabels:
    """Concatenate the labels of `merge`, int32 if they fit, for a device; `with_pads` keeps the padding of `hard`.

    A draw has the weight `weight`, other labels have the weight 1. Raises ValueError as `merge` does.
    """
    queries, size = _queries(positives, offsets, hard, draws, None)
    label, starts, draws_from = _concatenate_labels(queries, size, with_pads)
    fits = label.max(initial=0) < np.iinfo(np.int32).max
    label = label.astype(np.int32 if fits else np.int64, copy=False)
    use, weights = _mark(starts, draws_from, queries[1], np.float32(weight))
    return DrawnLabels(label, use, weights, starts.astype(np.int32))


@numba.njit(nogil=True, cache=True)
def _mark(starts, draws_from, offsets, weight):  # type: ignore[no-untyped-def]
    use, weights = np.empty(starts[-1], np.int32), np.empty(starts[-1], np.float32)
    for row in range(len(draws_from)):
        others = starts[row] + offsets[row + 1] - offsets[row]
        for place in range(np.uint64(starts[row]), np.uint64(starts[row + 1])):
            is_draw = place >= np.uint64(draws_from[row])
            use[place] = 2 * row + is_draw
            weights[place] = weight if is_draw else np.float32(-1 if place < np.uint64(others) else 1)
    return use, weights


def _queries(
    positives: np.ndarray, offsets: np.ndarray, hard: LabelLists, draws: LabelLists, pool: np.ndarray | None
) -> tuple[tuple[np.ndarray, ...], int]:
    """Return the arrays of a batch, int32 if all arrays are int32, and the number of labels. Raises ValueError."""
    hard, draws = _rows(hard, len(offsets)), _rows(draws, len(offsets))
    pool = _NONE if pool is None else pool
    columns = positives, hard.values, draws.values, pool
    kind = np.int32 if all(column.dtype == np.int32 for column in columns) else np.int64
    size = sum(map(len, columns))
    if size >= _LARGEST:
        raise ValueError(f"{size} labels in a batch; expected at most {_LARGEST - 1}: make the batch smaller")
    positive, negative, drawn, shared = (np.ascontiguousarray(column, kind) for column in columns)
    bounds = np.ascontiguousarray(offsets, np.int64)
    return (positive, bounds, negative, hard.offsets, drawn, draws.offsets, shared), size


def _rows(labels: LabelLists, bounds: int) -> Ragged:
    if labels is None:
        return Ragged(_NONE, np.zeros(bounds, np.int64))
    return Ragged.from_matrix(labels) if isinstance(labels, np.ndarray) else labels


@numba.njit(nogil=True, cache=True)
def _merge(queries, weights, pairs):  # type: ignore[no-untyped-def]
    label, starts, draws_from = _concatenate_labels(queries, len(pairs.ids), False)
    labels, _ = _number(label, len(label), pairs.ids, pairs.pair_label)
    latest, kept = np.full(labels, -1, np.int32), np.uint32(0)  # the latest pair of each label
    for row in range(len(draws_from)):
        begin = kept
        for i in range(starts[row], draws_from[row]):
            place = np.uint32(pairs.pair_label[i])
            latest[place], pairs.pair_label[kept] = kept, place
            kept += _ONE
        drawn = kept
        for i in range(draws_from[row], starts[row + 1]):
            place = np.uint32(pairs.pair_label[i])
            before = latest[place]
            if before >= np.int64(begin):  # the query already has the label
                pairs.pair_weight[before] += before >= np.int64(drawn)
            else:
                latest[place], pairs.pair_label[kept], pairs.pair_weight[kept] = kept, place, 1
                kept += _ONE
        pairs.pair_weight[begin:drawn] = weights[1]
        times = pairs.pair_weight[drawn:kept]
        for i in range(len(times)):
            times[i] = np.float32(times[i] * weights[0])
        _fill_row(row, queries[1], np.int64(begin), np.int64(kept), pairs.pair_query, pairs.pair_positive)
    return labels, np.int64(kept)


@numba.njit(nogil=True, cache=True)
def _merge_with_pool(queries, weight, pairs):  # type: ignore[no-untyped-def]
    """Write to the arrays of `pairs`; return the numbers of labels, pairs, labels of the pool, and masked pairs."""
    label, starts, _ = _concatenate_labels(queries, len(pairs.ids), False)
    size = starts[-1]
    labels, drawn = _number(label, size, pairs.ids, pairs.pair_label)
    for place in pairs.pair_label[size : len(label)]:
        pairs.pool_weight[place] += 1
    for i in range(drawn):
        pairs.pool_weight[i] = np.float32(pairs.pool_weight[i] * weight)
    pairs.pair_weight[:size] = 1
    for row in range(len(starts) - 1):
        _fill_row(row, queries[1], starts[row], starts[row + 1], pairs.pair_query, pairs.pair_positive)
    met = 0
    for pair in range(size):
        if pairs.pair_label[pair] < drawn:
            pairs.masked_query[met], pairs.masked_pool[met] = pairs.pair_query[pair], pairs.pair_label[pair]
            met += 1
    return labels, size, drawn, met


@numba.njit(nogil=True, cache=True)
def _fill_row(row, offsets, begin, end, query, positive):  # type: ignore[no-untyped-def]
    """Write the query of the pairs [begin, end) of a query, and whether each pair is a positive."""
    others = begin + offsets[row + 1] - offsets[row]
    for pair in range(np.uint64(begin), np.uint64(end)):
        query[pair] = row
        positive[pair] = pair < np.uint64(others)


@numba.njit(nogil=True, cache=True)
def _concatenate_labels(queries, size, with_pads):  # type: ignore[no-untyped-def]
    """Concatenate at most `size` labels per query, then the pool; `with_pads` keeps the padding of hard negatives.

    Return the labels, the start of each query [B + 1], and the start of each query's draws [B].
    """
    positives, offsets, hard, hard_offsets, draws, draw_offsets, pool = queries
    label = np.empty(size, positives.dtype)
    starts, draws_from = np.zeros(len(offsets), np.int64), np.empty(len(offsets) - 1, np.int64)
    size = 0
    for row in range(len(draws_from)):
        for i in range(offsets[row], offsets[row + 1]):
            label[size] = positives[i]
            size += 1
        draws_from[row] = _append(label, size, hard, hard_offsets[row], hard_offsets[row + 1], np.uint64(with_pads))
        size = starts[row + 1] = _append(
            label, draws_from[row], draws, draw_offsets[row], draw_offsets[row + 1], np.uint64(0)
        )
    label[size : size + len(pool)] = pool
    return label[: size + len(pool)], starts, draws_from


@numba.njit(nogil=True, cache=True)
def _append(label, size, values, start, stop, with_pads):  # type: ignore[no-untyped-def]
    """Append values[start:stop] to the first `size` labels, with padding if `with_pads` is 1; return the new size."""
    end = np.uint64(size)  # unsigned, like all indices here, which avoids a test for negative indices
    for place in range(np.uint64(start), np.uint64(stop)):
        value = values[place]
        label[end] = value
        end += np.uint64(value != PAD) | with_pads
    return np.int64(end)


@numba.njit(nogil=True, cache=True)
def _number(label, pairs, ids, place):  # type: ignore[no-untyped-def]
    """Number the labels, those of the pool (from `pairs` on) first: write `ids` [C], and each label's `place` in it.

    Return C, and the number of labels in the pool.
    """
    every = np.int64(0)
    for value in label:
        every |= np.int64(value)
    if every < _SPARSE * len(label):
        return _number_by_bits(label, pairs, (every >> 6) + 1, ids, place)
    words, others = np.empty(len(label), np.uint64), np.empty(len(label), np.uint64)
    in_others = _sort(label, every, words, others)
    return _number_sorted(others if in_others else words, np.uint64(pairs), ids, place)


@numba.njit(nogil=True, cache=True)
def _number_by_bits(label, pairs, words, ids, place):  # type: ignore[no-untyped-def]
    # Words, each next to the number of bits before it: first for labels outside the pool, then for labels of the pool.
    bits, in_pool = np.zeros((words, 2), np.uint64), np.zeros(words, np.uint64)
    before_in_pool = np.empty(words, np.uint32)
    for value in label[:pairs]:
        bits[np.uint64(value) >> _WORD, 0] |= _BIT << (np.uint64(value) & _LOW)
    for value in label[pairs:]:
        in_pool[np.uint64(value) >> _WORD] |= _BIT << (np.uint64(value) & _LOW)
    drawn = np.uint64(0)
    for word in in_pool:
        drawn += popcount(word)
    labels, before = drawn, np.uint64(0)
    for word in range(words):
        others = bits[word, 0] & ~in_pool[word]
        bits[word, 0], bits[word, 1], before_in_pool[word] = others, labels, before
        labels += popcount(others)
        before += popcount(in_pool[word])
    for i in range(len(label)):
        value = np.uint64(label[i])
        word, bit = value >> _WORD, _BIT << (value & _LOW)
        if bits[word, 0] & bit:
            number = bits[word, 1] + popcount(bits[word, 0] & (bit - _BIT))
        else:
            number = np.uint64(before_in_pool[word]) + popcount(in_pool[word] & (bit - _BIT))
        ids[number], place[i] = np.int64(value), np.int32(number)
    return np.int64(labels), np.int64(drawn)


@numba.njit(nogil=True, cache=True)
def _sort(label, every, words, others):  # type: ignore[no-untyped-def]
    """Sort words of (label, number) stably by label; return if the result is in `others`. `every`: or of all labels."""
    bits = 0
    while every >> bits:
        bits += 1
    passes = max(1, -(-bits // _DIGIT_BITS))
    width = -(-bits // passes)
    last = np.uint64((1 << width) - 1)
    ends = np.empty(1 << width, np.uint32)  # unsigned, like all counts here, which avoids a test for negative indices
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
    for number in range(len(label)):
        value = np.uint64(label[number])
        end = ends[value & last]
        target[end] = value << _SHIFT | np.uint64(number)
        ends[value & last] = end + _ONE


@numba.njit(nogil=True, cache=True)
def _deal_words(source, target, ends, shift, last):  # type: ignore[no-untyped-def]
    for word in source:
        digit = word >> shift & last
        end = ends[digit]
        target[end] = word
        ends[digit] = end + _ONE


@numba.njit(nogil=True, cache=True)
def _number_sorted(words, pairs, ids, place):  # type: ignore[no-untyped-def]
    """The words of a label end with those of the pool, so its last word shows whether the pool has the label."""
    size = len(words)
    other, first = np.uint64(size > 0), np.uint64(size > 0 and words[-1] & _MASK >= pairs)
    for i in range(size - 1):
        is_last = np.uint64(words[i] >> _SHIFT != words[i + 1] >> _SHIFT)
        other += is_last
        first += is_last & np.uint64(words[i] & _MASK >= pairs)
    labels, drawn, rank, after = np.int64(other), np.int64(first), np.uint64(0), np.uint64(2**64 - 1)
    for i in range(size):
        word = words[size - 1 - i]
        is_new, is_drawn = np.uint64(word >> _SHIFT != after), np.uint64(word & _MASK >= pairs)
        after = word >> _SHIFT
        first -= is_new & is_drawn
        other -= is_new & ~is_drawn
        rank = (first if is_drawn else other) if is_new else rank
        ids[rank] = np.int64(after)
        place[word & _MASK] = np.int32(rank)
    return labels, drawn
