"""One-vs-all with squared hinge loss: each label is trained against the rows that its weights score highest.

min_w 1/2 |w|^2 + C sum_i max(0, 1 - y_i (w.x_i - 1))^2. The bias is fixed at -1, its limit for many rows. A row that
shares no word with a label's points thus scores -1, adds no loss, and is never read. A label is first trained on its
positives alone. Each round runs dual coordinate descent (Hsieh et al., 2008, Algorithm 1), then adds the rows that the
weights score highest. An inverted index of words finds these rows.
"""

import math
import time

import numba
import numpy as np

from schemas.ragged import Ragged, SparseRows
from schemas.randomness import Purpose, generator
from scoring.scan import largest
from trainer.rows.numba_kernels import by_row
from trainer.threads import map_ranges

COST = 1.0  # C
ROUNDS = 5  # maximum number of rounds
MOST_ADDED = 100  # maximum number of negatives that a round adds, or the label's number of rows if greater
PASSES = 5  # maximum passes over the rows in a round
TOLERANCE = 0.1  # a round ends if no projected gradient is larger
ENTERS = 0.1  # a round adds negatives with a larger w.x
_TIMED = 64  # the time for 1 / _TIMED of the labels predicts the time for all labels
_COMMON = 256  # a word in more than 1 / _COMMON of the rows is common
_UNREAD = 0.1  # common words that would together add less to w.x are not looked up
_STEP, _ADD = np.uint64(6364136223846793005), np.uint64(1442695040888963407)  # linear congruential generator
_TOP = np.uint64(33)


@numba.njit(nogil=True, cache=True)
def _longer(array, size):  # type: ignore[no-untyped-def]
    grown = np.empty(max(size, 2 * len(array)), array.dtype)
    grown[: len(array)] = array
    return grown


@numba.njit(nogil=True, cache=True, fastmath=True)
def _descend(starts, words, values, squares, signs, count, w, alpha, order, state):  # type: ignore[no-untyped-def]
    """Continue the descent of `w` and `alpha` over `count` rows, in random order."""
    one, half = np.float32(1), np.float32(0.5 / COST)
    for _ in range(PASSES):
        worst = np.float32(0)
        for place in range(count - 1, 0, -1):
            state = state * _STEP + _ADD
            other = np.int64((state >> _TOP) % np.uint64(place + 1))
            order[place], order[other] = order[other], order[place]
        for place in range(count):
            row = order[place]
            score = -one
            for entry in range(starts[row], starts[row + 1]):
                score += w[words[entry]] * values[entry]
            gradient = signs[row] * score - one + alpha[row] * half
            if alpha[row] == 0 and gradient >= 0:
                continue
            worst = max(worst, abs(gradient))
            changed = max(alpha[row] - gradient / squares[row], np.float32(0))
            step = (changed - alpha[row]) * signs[row]
            alpha[row] = changed
            for entry in range(starts[row], starts[row + 1]):
                w[words[entry]] += step * values[entry]
        if worst <= TOLERANCE:
            break
    return state


@numba.njit(nogil=True, cache=True, fastmath=True)
def _fit(x, columns, means, points, labels, smallest):  # type: ignore[no-untyped-def]
    """Fit `labels` in turn; return features and weights of at least `smallest`, and where each label's weights end."""
    (offsets, ids, of_row), (column_offsets, rows_of, of_column) = x, columns
    rows, features = len(offsets) - 1, len(column_offsets) - 1
    local, names, w = np.full(features, -1, np.int32), np.empty(features, np.int32), np.empty(features, np.float32)
    sums, met, listed = np.zeros(rows, np.float32), np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
    touched, scores = np.empty(rows, np.int64), np.empty(rows, np.float32)
    members, signs, squares = np.empty(rows, np.int64), np.empty(rows, np.float32), np.empty(rows, np.float32)
    alpha, order, starts = np.empty(rows, np.float32), np.empty(rows, np.int64), np.zeros(rows + 1, np.int64)
    words, values = np.empty(1 << 12, np.int32), np.empty(1 << 12, np.float32)
    kept, weights, ends, total = np.empty(1 << 14, np.int32), np.empty(1 << 14, np.float32), np.empty_like(labels), 0
    for number in range(len(labels)):
        label = labels[number]
        first, stop = points[0][label], points[0][label + 1]
        count, known, known_of_positives, state = 0, 0, 0, np.uint64(label + 1)
        joining = stop - first
        touched[:joining] = points[1][first:stop]
        for round in range(ROUNDS):
            for place in range(joining):
                row = touched[place]
                listed[row], members[count], signs[count] = True, row, 1 if round == 0 else -1
                square, end = np.float32(0.5 / COST), starts[count]
                if end + offsets[row + 1] - offsets[row] > len(words):
                    words = _longer(words, end + offsets[row + 1] - offsets[row])
                    values = _longer(values, len(words))
                for entry in range(offsets[row], offsets[row + 1]):
                    feature = ids[entry]
                    if local[feature] < 0:
                        local[feature], names[known], w[known] = known, feature, 0
                        known += 1
                    words[end], values[end] = local[feature], of_row[entry]
                    square += of_row[entry] * of_row[entry]
                    end += 1
                alpha[count], order[count], squares[count], starts[count + 1] = 0, count, square, end
                count += 1
            if joining == 0:
                break
            if round == 0:
                known_of_positives = known
            state = _descend(starts, words, values, squares, signs, count, w, alpha, order, state)
            if round == ROUNDS - 1:
                break
            # Find rows through positive weights: only words of positives have positive weights.
            worth, read = np.empty(known_of_positives, np.float32), 0
            for word in range(known_of_positives):
                feature = names[word]
                length = column_offsets[feature + 1] - column_offsets[feature]
                worth[word] = w[word] * means[feature] / length
                if w[word] > 0:
                    read += length
            found, unread = 0, np.float32(0)
            everywhere = read > 4 * rows  # then the sums of all rows are scanned, which costs less than a list
            for word in np.argsort(worth):
                feature = names[word]
                if w[word] <= 0:
                    continue
                start, end = column_offsets[feature], column_offsets[feature + 1]
                if (end - start) * _COMMON > rows and unread + w[word] * means[feature] <= _UNREAD:
                    unread += w[word] * means[feature]
                    continue
                if everywhere:
                    for entry in range(start, end):
                        sums[rows_of[entry]] += w[word] * of_column[entry]
                    continue
                for entry in range(start, end):
                    row = rows_of[entry]
                    if not met[row]:
                        met[row], touched[found] = True, row
                        found += 1
                    sums[row] += w[word] * of_column[entry]
            candidates = 0
            for place in range(rows if everywhere else found):
                row = place if everywhere else touched[place]
                if sums[row] > ENTERS - unread and not listed[row]:
                    touched[candidates], scores[candidates] = row, sums[row]
                    candidates += 1
                sums[row], met[row] = 0, False
            least, most, joining = np.float32(0), max(MOST_ADDED, count), 0
            if candidates > most:
                least = largest(scores[:candidates].copy(), most)
            for place in range(candidates):
                if scores[place] >= least:
                    row, score = touched[place], np.float32(0)
                    for entry in range(offsets[row], offsets[row + 1]):
                        if local[ids[entry]] >= 0:
                            score += w[local[ids[entry]]] * of_row[entry]
                    if score > ENTERS:
                        touched[joining] = row
                        joining += 1
        for place in range(count):
            listed[members[place]] = False
        for word in range(known):
            local[names[word]] = -1
            if abs(w[word]) >= smallest:
                if total == len(kept):
                    kept, weights = _longer(kept, 0), _longer(weights, 0)
                kept[total], weights[total] = names[word], w[word]
                total += 1
        ends[number] = total
    return kept[:total].copy(), weights[:total].copy(), ends


def fit_labels(
    x: SparseRows, features: int, columns: SparseRows, points: Ragged, smallest: float, seconds: float = math.inf
) -> SparseRows | None:
    """Fit all labels; `points` lists the rows of x with each label. Returns the labels and weights of each feature.

    `columns` lists the rows with each feature. Weights below `smallest` are dropped. Returns None if the fit would take
    more than `seconds`, estimated from the time for some labels.
    """
    sums = np.bincount(x.ids, x.values, minlength=features)
    means = (sums / np.maximum(np.diff(columns.offsets), 1)).astype(np.float32)
    order = generator(0, Purpose.LINEAR_RANKER).permutation(points.rows)  # so that parts take equally long

    def fit(part: int, start: int, stop: int) -> tuple[np.ndarray, ...]:
        rows, transposed = (x.offsets, x.ids, x.values), (columns.offsets, columns.ids, columns.values)
        found = _fit(rows, transposed, means, (points.offsets, points.values), order[start:stop], np.float32(smallest))
        return *found[:2], np.diff(found[2], prepend=0)

    if seconds < math.inf and points.rows >= _TIMED:
        fit(0, 0, 1)  # compiles
        began, some = time.perf_counter(), points.rows // _TIMED
        map_ranges(fit, some, min_rows=2)
        if (time.perf_counter() - began) * points.rows / some > seconds:
            return None
    kept, weights, counts = map(np.concatenate, zip(*map_ranges(fit, points.rows, min_rows=2), strict=True))
    return SparseRows(*by_row(kept, np.repeat(order, counts).astype(np.int32), weights, features))


@numba.njit(nogil=True, cache=True, fastmath=True)
def _score(x, weights, labels, start, stop, found, scores):  # type: ignore[no-untyped-def]
    """Write the labels with the largest w.x for rows [start, stop) to `found` and `scores` [B, k], unsorted."""
    (offsets, ids, values), (weight_offsets, of_label, weight) = x, weights
    sums, seen, touched = np.zeros(labels), np.zeros(labels, np.bool_), np.empty(labels, np.int64)
    width = found.shape[1]
    for row in range(start, stop):
        count = 0
        for entry in range(offsets[row], offsets[row + 1]):
            for place in range(weight_offsets[ids[entry]], weight_offsets[ids[entry] + 1]):
                label = of_label[place]
                if label >= labels:
                    continue
                if not seen[label]:
                    seen[label], touched[count] = True, label
                    count += 1
                sums[label] += weight[place] * values[entry]
        met = touched[:count]
        totals = sums[met].astype(np.float32)
        least = np.float32(0)
        if count > width:
            least = max(least, largest(totals.copy(), width))
        taken = 0
        for place in range(count):
            label = met[place]
            if totals[place] > least:
                found[row, taken], scores[row, taken] = label, totals[place]
                taken += 1
            sums[label], seen[label] = 0, False
        if least > 0:  # fewer than `width` labels score more, and several may score the same
            tied = -met[totals == least]
            last = largest(tied.copy(), width - taken)
            for label in tied[tied >= last]:
                found[row, taken], scores[row, taken] = -label, least
                taken += 1


def best_labels(x: SparseRows, weights: SparseRows, labels: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Do the same as `words.best_labels`."""
    found, scores = np.full((x.rows, k), -1, np.int64), np.zeros((x.rows, k), np.float32)
    rows, by_feature = (x.offsets, x.ids, x.values), (weights.offsets, weights.ids, weights.values)
    map_ranges(lambda _, start, stop: _score(rows, by_feature, labels, start, stop, found, scores), x.rows, min_rows=32)
    best = np.lexsort((found, -scores), axis=1)
    return np.take_along_axis(scores, best, 1), np.take_along_axis(found, best, 1)
