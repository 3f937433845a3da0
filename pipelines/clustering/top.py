"""Top levels of the tree, for more points than fit into memory: grown on a sample, they give any point its part.

The part of a point depends on nothing but the point, so shards are divided in any order and anywhere. Parts
are equal in the sample and about equal beyond; the clusters within are equal all the same, because any number of points
n >= C (C - 1) is a sum of C and C - 1.
"""

from dataclasses import dataclass

import numpy as np

from pipelines.clustering.balanced import halved

_ROUNDS = 8
_ROWS = 1 << 15  # points whose scores are computed at a time


@dataclass(frozen=True)
class TopTree:
    """A binary tree of `depth` levels with 2**depth parts.

    `lines` [2**depth - 1, D] float32 and `thresholds` [2**depth - 1] float32, node after node, level by level: a point
    goes left where its product with the node's line is above the threshold.
    """

    lines: np.ndarray
    thresholds: np.ndarray

    @property
    def parts(self) -> int:
        """Number of leaves."""
        return len(self.thresholds) + 1


def grow(sample: np.ndarray, parts: int, seed: int) -> TopTree:
    """Grow the tree with `parts` leaves, a power of two, whose parts of `sample` [S, D] are equal within one.

    Each node is balanced 2-means, as the levels below are. Raises ValueError where `parts` is no power of two.
    """
    if parts < 1 or parts & (parts - 1):
        raise ValueError(f"{parts} parts; expected a power of two")
    vectors = np.ascontiguousarray(sample, np.float32)
    lines = [np.empty((0, vectors.shape[1]), np.float32)]
    thresholds = [np.empty(0, np.float32)]
    starts = np.array([0, len(vectors)])
    while len(starts) <= parts:
        sizes = np.diff(starts)
        left = (sizes + 1) // 2
        order, across = halved(vectors, starts, left, sizes > 1, seed, _ROUNDS)
        vectors = vectors[order]
        scores = _along(vectors, across, np.repeat(np.arange(len(sizes)), sizes))
        middle = starts[:-1] + left
        last, first = (np.clip(place, 0, max(0, len(scores) - 1)) for place in (middle - 1, middle))
        between = (scores[last] + scores[first]) / 2 if len(scores) else np.zeros(len(sizes))
        lines.append(across)
        thresholds.append(between.astype(np.float32))
        starts = np.append(np.stack([starts[:-1], middle], axis=1).reshape(-1), len(vectors))
    return TopTree(np.concatenate(lines), np.concatenate(thresholds))


def parts_of(tree: TopTree, vectors: np.ndarray, first: int) -> np.ndarray:
    """Find the part of each of `vectors` [n, D], which are points [first, first + n) of all: [0, parts), int64 [n].

    Where a point lies on the border, a bit of its number decides: points that are all the same spread over the parts.
    """
    vectors = np.ascontiguousarray(vectors, np.float32)
    node = np.zeros(len(vectors), np.int64)
    number = np.arange(first, first + len(vectors))
    level = 0
    while (1 << level) < tree.parts:
        above = _along(vectors, tree.lines, node) - tree.thresholds[node]
        right = (above < 0) | ((above == 0) & ((number >> level) & 1 == 1))
        node = 2 * node + 1 + right
        level += 1
    return node - (tree.parts - 1)


def _along(vectors: np.ndarray, lines: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Return x . lines[part of x] for every point, float32 [N]."""
    scores = np.empty(len(vectors), np.float32)
    for start in range(0, len(vectors), _ROWS):
        rows = slice(start, start + _ROWS)
        scores[rows] = np.einsum("nd,nd->n", vectors[rows], lines[part[rows]])
    return scores
