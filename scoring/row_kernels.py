"""Kernels for a single row: its features, sums over lists, votes, names, and trees, with the same bits as NumPy's."""

import numpy as np

from scoring.names import LETTERS
from scoring.scan import find_largest, kernel
from trainer.encoders.bag import FINISH, MIX, PAIR_BUCKETS

_ONE, _TOP, _MIDDLE = np.uint64(1), np.uint64(32), np.uint64(20)
_CONTINUES, _NO_WORD = 0, 2  # as in `names`
_LOW = (1 << 32) - 1
_ROUNDING = 1e-3  # more than sums are rounded
_TINY = 1e-45  # the least float32 above 0
_SEARCH = 32  # entries that are added in the time in which one is looked up
_EXPONENT, _BIAS = 52, 1023  # of float64


@kernel
def position(values, sought):  # type: ignore[no-untyped-def]
    """Return how many of the ascending `values` are less than `sought`."""
    low, size = 0, len(values)
    while size > 0:
        half = (size + 1) // 2
        low = low + half if values[low + half - 1] < sought else low
        size -= half
    return low


@kernel
def count(tokens, ngrams, vocabulary, buckets):  # type: ignore[no-untyped-def]
    """Do the same as `count_ngrams` for int64 [T] tokens: return features, ascending, and counts."""
    keys, total = np.empty(len(tokens) * ngrams, np.int64), 0
    for start in range(len(tokens)):
        code = np.uint64(0)
        for length in range(1, min(ngrams, len(tokens) - start) + 1):
            code = code * MIX + np.uint64(tokens[start + length - 1]) + _ONE
            keys[total] = tokens[start]
            if length > 1:
                keys[total] = np.int64(((code ^ (code >> _TOP)) * FINISH) >> _MIDDLE) % buckets + vocabulary
            total += 1
    keys = np.sort(keys[:total])
    counts, distinct = np.zeros(total, np.int64), 0
    for place in range(total):
        if place == 0 or keys[place] != keys[place - 1]:
            keys[distinct] = keys[place]
            distinct += 1
        counts[distinct - 1] += 1
    return keys[:distinct], counts[:distinct]


@kernel
def weigh_words(tokens, in_title, ngrams, vocabulary, weight_of, seen, factors, title):  # type: ignore[no-untyped-def]
    """Do the same as `RowFeatures`: numbers of features and weights float32; `in_title`: tokens of the title."""
    most = len(tokens) * (ngrams + 1)
    numbers, values, known = np.empty(most, np.int64), np.empty(most, np.float32), 0
    for part in range(2 if title else 1):
        first, square = known, 0.0
        if part:
            ids, counts = count(tokens[:in_title], 1, vocabulary, PAIR_BUCKETS)
            ids += vocabulary + PAIR_BUCKETS
        else:
            ids, counts = count(tokens, ngrams, vocabulary, PAIR_BUCKETS)
        for place in range(len(ids)):
            number = position(seen, ids[place])
            if number < len(seen) and seen[number] == ids[place]:
                numbers[known], values[known] = number, weight_of[counts[place]] * factors[number]
                square += np.float64(values[known]) * np.float64(values[known])
                known += 1
        length = (title if part else 1.0) / max(np.sqrt(square), 1e-12)
        for place in range(first, known):
            values[place] = np.float64(values[place]) * length
    return numbers[:known], values[:known]


@kernel
def sum_lists(numbers, values, ids, weights, offsets, size, k, bounds):  # type: ignore[no-untyped-def]
    """Return ids int64 in [0, size) and sums float32 above 0, among which are the best `k` and those with equal sums.

    `ids`, `weights` and `offsets`: the list of each feature. `bounds`: the largest weight of each list if none is
    negative, else empty. With bounds, a list of more than half of the ids is only looked up for ids that can be among
    the best. That changes the order of a sum, but sums of products from 2^-24 to 16 are exact in any order.
    """
    sums, none, bound, later, work = np.zeros(size), np.zeros(0, np.bool_), 0.0, np.zeros(len(numbers), np.bool_), 0
    for last in (False, True):
        for entry in range(len(numbers)):
            start, stop = offsets[numbers[entry]], offsets[numbers[entry] + 1]
            if not last and len(bounds) and 2 * (stop - start) > size:
                later[entry], bound, work = True, bound + bounds[numbers[entry]] * values[entry], work + stop - start
            elif last == later[entry]:
                for place in range(start, stop):
                    sums[ids[place]] += weights[place] * values[entry]
        able, least = find_largest(sums, none, k, _ROUNDING if last else bound + _ROUNDING, _TINY)
        if last or bound == 0:
            break
        if least > _TINY and len(able) * later.sum() * _SEARCH < work:
            for entry in np.flatnonzero(later):
                start, stop = offsets[numbers[entry]], offsets[numbers[entry] + 1]
                for label in able:
                    at = start + position(ids[start:stop], label)
                    if at < stop and ids[at] == label:
                        sums[label] += weights[at] * values[entry]
            break
    return able, sums[able].astype(np.float32)


@kernel
def sum_votes(points, shares, labels, offsets):  # type: ignore[no-untyped-def]
    """Do the same as `count_votes`: return the labels of `points`, int64 and ascending, and votes float32."""
    keys = np.empty(0, np.int64)
    for place in range(len(points)):
        own = labels[offsets[points[place]] : offsets[points[place] + 1]].astype(np.int64)
        keys = np.append(keys, (own << 32) + place)
    keys.sort()
    voted, votes, count = np.empty(len(keys), np.int64), np.zeros(len(keys)), 0
    for key in keys:
        if count == 0 or voted[count - 1] != key >> 32:
            voted[count] = key >> 32
            count += 1
        votes[count - 1] += shares[key & _LOW]
    return voted[:count], votes[:count].astype(np.float32)


@kernel
def look_up(ids, voted, votes):  # type: ignore[no-untyped-def]
    """Do the same as `votes_of`: the votes of `ids`; `voted` is ascending."""
    found = np.zeros(len(ids), np.float32)
    for place in range(len(ids)):
        at = position(voted, ids[place])
        if at < len(voted) and voted[at] == ids[place]:
            found[place] = votes[at]
    return found


@kernel
def find_stems(tokens, codes, lengths, kinds, seen):  # type: ignore[no-untyped-def]
    """Return the numbers of the stems `seen` in names that int64 [T] tokens have, ascending; other arguments: Stems."""
    stems, words, letters = np.zeros(len(tokens) + 1, np.uint64), 0, 0
    for place in range(len(tokens)):
        token = tokens[place]
        if place == 0 or kinds[token] != _CONTINUES or kinds[tokens[place - 1]] == _NO_WORD:
            words, letters = words + (letters > 0), 0
            stems[words] = 0
        stems[words] += codes[token, min(letters, LETTERS)]
        letters += lengths[token]
    stems = np.sort(stems[: words + (letters > 0)])
    numbers, found = np.empty(len(stems), np.int64), 0
    for place in range(len(stems)):
        number = position(seen, stems[place])
        if number < len(seen) and seen[number] == stems[place] and (found == 0 or numbers[found - 1] != number):
            numbers[found] = number
            found += 1
    return numbers[:found]


@kernel
def list_stems(voted, votes, names, offsets):  # type: ignore[no-untyped-def]
    """Return the stems of the names of labels `voted`, and for each stem the votes of its label."""
    total = 0
    for label in voted:
        total += offsets[label + 1] - offsets[label]
    stems, values, total = np.empty(total, np.int64), np.empty(total), 0
    for place in range(len(voted)):
        for entry in range(offsets[voted[place]], offsets[voted[place] + 1]):
            stems[total], values[total] = names[entry], votes[place]
            total += 1
    return stems, values


@kernel
def score_names(stems, values, ids, names, offsets, idf):  # type: ignore[no-untyped-def]
    """Do the same as `Names.score`: share, weight and number of stems [3, S], for a text's stems with values."""
    scores, dense = np.empty((3, len(ids)), np.float32), np.zeros(len(idf))
    for place in range(len(stems)):
        dense[stems[place]] += values[place]
    for place in range(len(ids)):
        start, stop = offsets[ids[place]], offsets[ids[place] + 1]
        weight = found = 0.0
        for entry in range(start, stop):
            weight += idf[names[entry]]
            found += idf[names[entry]] * np.float64(np.float32(dense[names[entry]]))
        nothing = np.nan if start == stop else 0.0
        scores[0, place] = found / max(weight, 1e-12) + nothing
        scores[1, place], scores[2, place] = weight + nothing, stop - start + nothing
    return scores


@kernel
def rank(scores, near):  # type: ignore[no-untyped-def]
    """Do the same as `fusion._ranks`: how many `near` labels score more, float64 [S]."""
    ranks, compared = np.empty(len(scores)), np.where(near, scores, -np.inf)
    for place in range(len(scores)):
        more, own = 0, scores[place]
        for other in range(len(compared)):
            more += compared[other] > own
        ranks[place] = more
    return ranks


@kernel
def find_leaves(x, thresholds, starts, masks, values, first, left, words):  # type: ignore[no-untyped-def]
    """Return the values of the leaves that rows reach, float64 [S, trees]; x float64 [C, S], without infinite values.

    The thresholds of column c begin at `starts[c]`, its `masks` at `starts[c]` + 2 c; otherwise as in `Trees`. `left`:
    space for the masks of a row; masks, and `words` of the same space, are uint64, because long words are faster.
    """
    found, rows = np.empty((x.shape[1], len(first) - 1)), np.full(-(-len(x) // 4) * 4, len(masks) - 1)
    for row in range(x.shape[1]):
        for column in range(len(x)):
            value, start, stop = x[column, row], starts[column], starts[column + 1]
            at = stop - start + 1 if np.isnan(value) else position(thresholds[start:stop], value)
            rows[column] = start + 2 * column + at
        words[:] = masks[-1]
        for column in range(0, len(rows), 4):  # four at a time, to load and store `words` less often
            a, b, c, d = (
                masks[rows[column]],
                masks[rows[column + 1]],
                masks[rows[column + 2]],
                masks[rows[column + 3]],
            )
            for place in range(len(words)):
                words[place] &= a[place] & b[place] & c[place] & d[place]
        for tree in range(found.shape[1]):
            lowest = np.float64(np.uint64(left[tree]) & (~np.uint64(left[tree]) + _ONE))  # a power of two
            found[row, tree] = values[first[tree] + (lowest.view(np.int64) >> _EXPONENT) - _BIAS]
    return found
