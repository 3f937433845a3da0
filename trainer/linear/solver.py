"""One-vs-all with squared hinge loss by dual coordinate descent, one classifier after another over a group's rows.

min_w 1/2 |w|^2 + C sum_i max(0, 1 - y_i w.x_i)^2, with the bias as one more feature of value 1: Hsieh et al. (2008),
Algorithms 1 and 3; Fan et al. (2008). Rows of a group are copied with features numbered from 0, so that w stays in the
cache.
"""

import numba
import numpy as np

from schemas.ragged import Ragged, SparseRows

COST = 1.0  # C
ROUNDS = 20  # over all rows of a classifier, at most
TOLERANCE = 0.1  # of the projected gradient, where a classifier is done
_STEP, _ADD = np.uint64(6364136223846793005), np.uint64(1442695040888963407)  # of a linear congruential generator
_TOP = np.uint64(33)


@numba.njit(nogil=True, cache=True)
def renumber(offsets, ids, values, rows, local, names):  # type: ignore[no-untyped-def]
    """Copy `rows` of sparse rows with features numbered from 0: (offsets, ids, values, features).

    `local` [V] int32, all -1, and `names` [V] are scratch: names[f] is the feature that f stands for.
    """
    count, total, known = len(rows), 0, 0
    for place in range(count):
        total += offsets[rows[place] + 1] - offsets[rows[place]]
    starts, features, weights = np.zeros(count + 1, np.int64), np.empty(total, np.int32), np.empty(total, np.float32)
    end = 0
    for place in range(count):
        for entry in range(offsets[rows[place]], offsets[rows[place] + 1]):
            feature = ids[entry]
            if local[feature] < 0:
                local[feature], names[known] = known, feature
                known += 1
            features[end], weights[end] = local[feature], values[entry]
            end += 1
        starts[place + 1] = end
    for feature in range(known):
        local[names[feature]] = -1
    return starts, features, weights, known


@numba.njit(nogil=True, cache=True, fastmath=True)
def _fit_one(offsets, ids, values, squares, signs, w, alpha, order, seed):  # type: ignore[no-untyped-def]
    """Fit one classifier of n rows into `w`, which is 0, and return its bias. `alpha`, `order` [n] are scratch."""
    count = len(signs)
    bias, half, state = np.float32(0), np.float32(0.5 / COST), seed
    for place in range(count):
        alpha[place], order[place] = np.float32(0), place
    active, bound = count, np.float32(np.inf)
    for _ in range(ROUNDS):
        for place in range(active - 1, 0, -1):
            state = state * _STEP + _ADD
            other = np.int64((state >> _TOP) % np.uint64(place + 1))
            order[place], order[other] = order[other], order[place]
        highest, lowest, place = np.float32(-np.inf), np.float32(np.inf), 0
        while place < active:
            row = order[place]
            score = bias
            for entry in range(offsets[row], offsets[row + 1]):
                score += w[ids[entry]] * values[entry]
            gradient = signs[row] * score - np.float32(1) + alpha[row] * half
            projected = gradient
            if alpha[row] == 0:
                if gradient > bound:  # shrinking: it stays at 0
                    active -= 1
                    order[place], order[active] = order[active], order[place]
                    continue
                projected = min(gradient, np.float32(0))
            highest, lowest = max(highest, projected), min(lowest, projected)
            changed = max(alpha[row] - gradient / squares[row], np.float32(0))
            step = (changed - alpha[row]) * signs[row]
            alpha[row] = changed
            if step != 0:
                bias += step
                for entry in range(offsets[row], offsets[row + 1]):
                    w[ids[entry]] += step * values[entry]
            place += 1
        if highest - lowest <= TOLERANCE:
            if active == count:
                break
            active, bound = count, np.float32(np.inf)  # once more over all rows
        else:
            bound = highest if highest > 0 else np.float32(np.inf)
    return bias


@numba.njit(nogil=True, cache=True)
def _longer(array):  # type: ignore[no-untyped-def]
    grown = np.empty(2 * len(array), array.dtype)
    grown[: len(array)] = array
    return grown


@numba.njit(nogil=True, cache=True)
def _fit(offsets, ids, values, features, groups, members, positives, positive_rows, tasks, smallest):  # type: ignore[no-untyped-def]
    rows = len(offsets) - 1
    place_of = np.empty(rows, np.int64)
    local, names = np.full(features, -1, np.int32), np.empty(features, np.int32)
    w = np.empty(features, np.float32)
    keys, children, weights = np.empty(1 << 14, np.int64), np.empty(1 << 14, np.int32), np.empty(1 << 14, np.float32)
    count, total = 0, 0
    for task in range(len(tasks)):
        total += tasks[task, 2] - tasks[task, 1]
    biases = np.full(total, np.float32(-1))  # of a child without positives
    done = 0
    for task in range(len(tasks)):
        group, start, stop = tasks[task]
        of_group = members[groups[group] : groups[group + 1]]
        starts, numbers, held, known = renumber(offsets, ids, values, of_group, local, names)
        squares, signs = np.empty(len(of_group), np.float32), np.empty(len(of_group), np.float32)
        alpha, order = np.empty(len(of_group), np.float32), np.empty(len(of_group), np.int64)
        for place in range(len(of_group)):
            place_of[of_group[place]] = place
            square = 1 + 0.5 / COST
            for entry in range(starts[place], starts[place + 1]):
                square += held[entry] * held[entry]
            squares[place] = square
        for child in range(start, stop):
            if positives[child] < positives[child + 1]:
                signs[:] = -1
                for entry in range(positives[child], positives[child + 1]):
                    signs[place_of[positive_rows[entry]]] = 1
                w[:known] = 0
                biases[done] = _fit_one(starts, numbers, held, squares, signs, w, alpha, order, np.uint64(child + 1))
                for number in range(known):
                    if abs(w[number]) >= smallest:
                        if count == len(keys):
                            keys, children, weights = _longer(keys), _longer(children), _longer(weights)
                        keys[count] = group * features + names[number]
                        children[count], weights[count] = child, w[number]
                        count += 1
            done += 1
    return keys[:count].copy(), children[:count].copy(), weights[:count].copy(), biases


def fit_children(
    x: SparseRows, features: int, groups: Ragged, positives: Ragged, tasks: np.ndarray, smallest: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Fit a classifier for each child of `tasks` [T, 3] (group, first child, end): against all other rows of its group.

    `groups`: rows of x of each group; `positives`: those of each child, all in its group. Returns the weights from
    `smallest` on, as (group * features + feature, child, weight) [n] each, and the biases of the children.
    """
    return _fit(  # type: ignore[no-any-return]
        x.offsets, x.ids, x.values, features, groups.offsets, groups.values, positives.offsets, positives.values,
        tasks, smallest,
    )  # fmt: skip
