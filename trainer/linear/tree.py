"""A tree of labels: balanced clusters by cosine, a classifier a node, beam search (Yu et al., 2022: XR-Linear)."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numba
import numpy as np

from schemas import PAD
from schemas.ragged import Ragged, SparseRows, offsets_of
from schemas.randomness import Purpose, generator
from trainer.linear.solver import fit_children, renumber
from trainer.rows.threads import in_parts

LEAF = 100  # labels of a cluster, at most
BRANCH = 4  # bits of a level: 16 children a node
BEAM = 10
SMALLEST = 0.1  # weights below are left out
_ROUNDS = 8  # of 2-means
_TASKS = 32  # of a level


@numba.njit(nogil=True, cache=True, fastmath=True)
def _halve(offsets, ids, values, features, order, bounds, start, stop):  # type: ignore[no-untyped-def]
    """Order the labels of the segments [start, stop) so that the halves of each are clusters (spherical 2-means)."""
    local, names = np.full(features, -1, np.int32), np.empty(features, np.int32)
    for segment in range(start, stop):
        rows = order[bounds[segment] : bounds[segment + 1]].copy()
        count = len(rows)
        half = count // 2
        if count < 2:
            continue
        starts, numbers, weights_of, known = renumber(offsets, ids, values, rows, local, names)
        difference = np.zeros(known, np.float32)
        for seed, sign in ((0, np.float32(-1)), (half, np.float32(1))):
            for entry in range(starts[seed], starts[seed + 1]):
                difference[numbers[entry]] += sign * weights_of[entry]
        scores, by_score = np.empty(count, np.float32), np.arange(count)
        for _ in range(_ROUNDS):
            for row in range(count):
                score = np.float32(0)
                for entry in range(starts[row], starts[row + 1]):
                    score += difference[numbers[entry]] * weights_of[entry]
                scores[row] = score
            by_score = np.argsort(scores, kind="mergesort")
            means = np.zeros((2, known), np.float32)
            for place in range(count):
                side = 1 if place >= half else 0
                for entry in range(starts[by_score[place]], starts[by_score[place] + 1]):
                    means[side, numbers[entry]] += weights_of[entry]
            for side in range(2):
                square = np.float32(0)
                for number in range(known):
                    square += means[side, number] * means[side, number]
                means[side] /= np.float32(max(math.sqrt(square), 1e-12))
            difference = means[1] - means[0]
        order[bounds[segment] : bounds[segment + 1]] = rows[by_score]


@numba.njit(nogil=True, cache=True, fastmath=True)
def _descend(offsets, ids, values, features, level, beam, paths, start, stop, found, scores):  # type: ignore[no-untyped-def]
    """Take queries [start, stop) one level down: of all children of their `beam`, the best into `found`, `scores`."""
    keys, starts, children, weights, biases, first, groups = level
    widest, width = 0, found.shape[1]
    for group in range(len(first) - 1):
        widest = max(widest, first[group + 1] - first[group])
    sums = np.empty(widest, np.float32)
    for query in range(start, stop):
        count, worst = 0, 0
        for place in range(beam.shape[1]):
            group = beam[query, place]
            if group < 0:
                continue
            low, high = first[group], first[group + 1]
            sums[: high - low] = biases[low:high]
            for entry in range(offsets[query], offsets[query + 1]):
                key = group * features + ids[entry]
                left, right = groups[group], groups[group + 1]
                while left < right:
                    middle = (left + right) >> 1
                    if keys[middle] < key:
                        left = middle + 1
                    else:
                        right = middle
                if left < groups[group + 1] and keys[left] == key:
                    for weight in range(starts[left], starts[left + 1]):
                        sums[children[weight] - low] += weights[weight] * values[entry]
            for child in range(low, high):
                hinge = max(np.float32(1) - sums[child - low], np.float32(0))
                score = paths[query, place] * math.exp(-hinge * hinge * hinge)
                if count < width:
                    found[query, count], scores[query, count] = child, score
                    count += 1
                    if count == width:
                        worst = np.argmin(scores[query])
                elif score > scores[query, worst]:
                    found[query, worst], scores[query, worst] = child, score
                    worst = np.argmin(scores[query])


@dataclass(frozen=True, eq=False)
class Level:
    """Classifiers of the children of G groups: group g has [first[g], first[g + 1]).

    Of (group, feature) `keys` [K], ascending, those with weights are `children`, `weights` [starts[k], starts[k + 1]).
    """

    keys: np.ndarray
    starts: np.ndarray
    children: np.ndarray
    weights: np.ndarray
    biases: np.ndarray
    first: np.ndarray

    @classmethod
    def fit(cls, x: SparseRows, features: int, groups: Ragged, positives: Ragged, first: np.ndarray) -> "Level":
        """Fit the classifiers of one level; `groups`, `positives`: rows of x of its groups and of their children."""
        blocks = list(_blocks(groups.counts, first))

        def fit_blocks(part: int, start: int, stop: int) -> list[tuple[np.ndarray, ...]]:
            return [fit_children(x, features, groups, positives, tasks, SMALLEST) for tasks in blocks[start:stop]]

        fitted = itertools.chain.from_iterable(in_parts(fit_blocks, len(blocks), alone=2))
        keys, children, weights, biases = map(np.concatenate, zip(*fitted, strict=True))
        order = np.argsort(keys, kind="stable")
        unique, starts = np.unique(keys[order], return_index=True)
        return cls(unique, np.append(starts, len(keys)), children[order], weights[order], biases, first)

    def descend(
        self, x: SparseRows, features: int, beam: np.ndarray, paths: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the best children [B, width] of the groups `beam` [B, b], in no order, and their paths' scores."""
        found = np.full((x.rows, width), PAD, np.int64)
        scores = np.zeros((x.rows, width), np.float32)
        groups = np.searchsorted(self.keys, np.arange(len(self.first), dtype=np.int64) * features)
        level = (self.keys, self.starts, self.children, self.weights, self.biases, self.first, groups)
        in_parts(
            lambda part, start, stop: _descend(
                x.offsets, x.ids, x.values, features, level, beam, paths, start, stop, found, scores
            ),
            x.rows,
            alone=2,
        )
        return found, scores


@dataclass(frozen=True, eq=False)
class LabelTree:
    """Levels of classifiers from the root down; the children of the last one are the labels `order` [L]."""

    features: int
    order: np.ndarray
    levels: tuple[Level, ...]

    @classmethod
    def fit(cls, x: SparseRows, features: int, labels: Ragged, centroids: SparseRows) -> "LabelTree":
        """Fit a tree to rows x, of features [0, `features`), with `labels`; `centroids`: features of each label."""
        count = centroids.rows
        depth = max(0, math.ceil(math.log2(max(count / LEAF, 1))))
        order, bounds = _cluster(centroids, features, depth)
        place = np.empty(count, np.int64)
        place[order] = np.arange(count)
        row, at = labels.row_of(), place[labels.entries]
        cluster = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        depths = [*range(depth % BRANCH or BRANCH, depth + 1, BRANCH)]
        groups, above = Ragged(np.arange(x.rows), np.array([0, x.rows])), 0
        levels = []
        for level in (*depths, None):
            if level is None:
                parents, child = cluster, at
            else:
                parents, child = np.arange(1 << level) >> (level - above), cluster[at] >> (depth - level)
            first = np.searchsorted(parents, np.arange((1 << above) + 1)).astype(np.int64)
            positives = _rows_of(child, row, len(parents), x.rows)
            levels.append(Level.fit(x, features, groups, positives, first))
            groups, above = positives, above if level is None else level
        return cls(features, order, tuple(levels))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays by name."""
        parts = {
            f"{number}/{field.name}": getattr(level, field.name)
            for number, level in enumerate(self.levels)
            for field in fields(level)
        }
        return {"order": self.order, **parts}

    @classmethod
    def from_arrays(cls, features: int, arrays: Mapping[str, np.ndarray]) -> "LabelTree":
        """Return the tree of `arrays`. Raises KeyError, ValueError where they do not fit together."""
        depth = len(arrays) // len(fields(Level))
        levels = [
            Level(**{field.name: arrays[f"{level}/{field.name}"] for field in fields(Level)}) for level in range(depth)
        ]
        return cls(features, arrays["order"], tuple(levels))

    def rank(self, x: SparseRows, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores float32 [B, k] in [0, 1], label ids [B, k]) best first, equal ones by id; 0 and -1 pad."""
        beam, paths = np.zeros((x.rows, 1), np.int64), np.ones((x.rows, 1), np.float32)
        for level in self.levels:
            width = k if level is self.levels[-1] else BEAM
            beam, paths = level.descend(x, self.features, beam, paths, width)
        ids = np.where(beam == PAD, PAD, self.order[beam])
        best = np.lexsort((ids, -paths), axis=1)
        return np.take_along_axis(paths, best, 1), np.take_along_axis(ids, best, 1)


def _cluster(centroids: SparseRows, features: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Return labels in an order [L], and the bounds [2^depth + 1] of clusters that differ in size by one at most."""
    order = generator(0, Purpose.LABEL_TREE).permutation(centroids.rows)
    bounds = np.array([0, centroids.rows])
    for _ in range(depth):
        in_parts(
            lambda part, start, stop, bounds=bounds: _halve(  # type: ignore[misc]
                centroids.offsets, centroids.ids, centroids.values, features, order, bounds, start, stop
            ),
            len(bounds) - 1,
            alone=2,
        )
        bounds = np.sort(np.concatenate([bounds, bounds[:-1] + np.diff(bounds) // 2]))
    return order, bounds


def _rows_of(child: np.ndarray, row: np.ndarray, children: int, rows: int) -> Ragged:
    """Return the rows of each child, ascending and each once, from pairs."""
    pairs = np.unique(child.astype(np.int64) * rows + row)
    return Ragged(pairs % rows, offsets_of(np.bincount(pairs // rows, minlength=children)))


def _blocks(rows: np.ndarray, first: np.ndarray) -> Iterator[np.ndarray]:
    """Cut (group, first child, end) into blocks of about equal work; a large group is cut difference its children."""
    share = max(1.0, float(np.sum(rows * np.diff(first))) / _TASKS)
    tasks: list[tuple[int, int, int]] = []
    work = 0.0
    for group, (start, stop) in enumerate(itertools.pairwise(first)):
        pieces = max(1, min(int(stop - start), round(rows[group] * (stop - start) / share)))
        for part in np.array_split(np.arange(start, stop), pieces):
            if not len(part):
                continue
            tasks.append((group, int(part[0]), int(part[-1]) + 1))
            work += float(rows[group]) * len(part)
            if work >= share:
                yield np.array(tasks, np.int64)
                tasks, work = [], 0.0
    if tasks:
        yield np.array(tasks, np.int64)
