"""Balanced hierarchical k-means: halve the points repeatedly until clusters of equal size remain (NGAME, appendix C).

All parts of one level are halved together, in a few passes over the points. There are log2(N / C) levels, so the cost
is O(N D log(N / C)). The results do not depend on the number of threads.

If the points do not fit into memory, the points are first divided into parts by a tree that is built on a sample. A
point's part depends only on the point itself, so workers can process the shards in any order. The parts have equal
sizes in the sample, and approximately equal sizes in the full data. The cluster sizes within a part still differ by at
most one, because any number of points n >= C (C - 1) is a sum of terms C and C - 1.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from schemas.randomness import Purpose, generator

_ROUNDS = 8  # rounds of 2-means per level; most parts converge in fewer rounds
_ROWS = 1 << 15  # points whose scores are computed at a time


def balanced_order(vectors: np.ndarray, size: int, smallest: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return point indices ordered by cluster, int64 [N], and the boundaries [K + 1] of K = ceil(N / size) clusters.

    Clusters of `vectors` [N, D] have floor(N / K) or ceil(N / K) points, the larger ones first. They are in the order
    of the tree's leaves, so neighbouring clusters are close in space. Within each cluster, points are ordered as if the
    tree divided the cluster further, down to `smallest` points. If a cluster of n points is divided into m equal parts,
    part i is the range [i n // m, (i + 1) n // m). Both sizes are 1 or more.
    """
    count = len(vectors)
    vectors = np.ascontiguousarray(vectors, np.float32)
    order = np.arange(count)  # points, ordered by part
    # The start of each part, and the number of clusters that the part is divided into.
    starts, clusters = np.array([0, count]), np.array([-(-count // size)])
    while clusters.max(initial=0) > 1:
        left = (clusters + 1) // 2
        base, larger = np.divmod(np.diff(starts), clusters)  # sizes of a part's leaves differ by at most one
        sizes = base * left + np.minimum(larger, left)
        order = order[halve(vectors[order], starts, sizes, clusters > 1, seed)[0]]
        middle = starts[:-1] + sizes
        halves = np.stack([middle, starts[1:]], axis=1).reshape(-1)
        counts = np.stack([left, clusters - left], axis=1).reshape(-1)
        kept = counts > 0  # a part that is already one cluster has no right half
        starts, clusters = np.concatenate([[0], halves[kept]]), counts[kept]
    parts, edges = 2, starts
    while parts * smallest <= size and count:
        points = np.diff(starts)[:, None]
        inner = starts[:-1, None] + np.arange(parts) * points // parts
        finer = np.append(inner.reshape(-1), count)
        sizes = np.diff(finer)[0::2]
        order = order[halve(vectors[order], edges, sizes, np.diff(edges) > 1, seed)[0]]
        parts, edges = 2 * parts, finer
    return order, starts


def halve(
    vectors: np.ndarray, starts: np.ndarray, left: np.ndarray, divided: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Apply balanced 2-means in every part; return the order [N] with each part's left half before its right half.

    `vectors` [N, D] are ordered by part. A point x is assigned to a half by its rank along the line through both
    centroids, c1 and c2. For halves of given sizes this assignment is optimal: the sum of squared distances to the
    centroids is smallest if the points with the largest x.(c1 - c2) are assigned to c1. Also returns the lines [P, D].
    """
    sizes = np.diff(starts)
    part = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(part)) - starts[:-1][part]
    goes_left = within < left[part]
    # The first line of a part is the difference of two points that are drawn from the part.
    draw = generator(seed, Purpose.CLUSTER_LINES, len(sizes))
    two = starts[:-1, None] + (draw.random((len(sizes), 2)) * sizes[:, None]).astype(np.int64)
    two = np.minimum(two, max(0, len(part) - 1))  # for a part without points
    lines = vectors[two[:, 0]] - vectors[two[:, 1]]
    order, scores = np.arange(len(part)), np.empty(len(part), np.float32)
    for last in range(_ROUNDS - 1, -1, -1):
        for number, (low, high) in enumerate(itertools.pairwise(starts.tolist())):
            np.einsum("nd,d->n", vectors[low:high], lines[number], out=scores[low:high])
        # Ties keep their order, and so do all points of a part that is not divided.
        scores[~divided[part]] = 0
        new = np.lexsort((-scores, part))
        moved = np.zeros(len(part), bool)
        moved[new[goes_left]] = True
        before = np.zeros(len(part), bool)
        before[order[goes_left]] = True
        order = new
        if not last or np.array_equal(moved, before):
            break
        lines = _centroid_differences(vectors, order, starts, left)
    return order, lines


def _centroid_differences(vectors: np.ndarray, order: np.ndarray, starts: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Return the difference c1 - c2 of the centroids of each part's halves in `order`, float32 [P, D]."""
    edges = np.append(np.stack([starts[:-1], starts[:-1] + left], axis=1).reshape(-1), starts[-1])
    means = np.zeros((len(edges) - 1, vectors.shape[1]))
    for half, (low, high) in enumerate(itertools.pairwise(edges.tolist())):
        if high > low:  # `np.add.reduceat` over all halves takes ten times as long
            np.add.reduce(vectors[order[low:high]], axis=0, dtype=np.float64, out=means[half])
            means[half] /= high - low
    return (means[0::2] - means[1::2]).astype(np.float32)


@dataclass(frozen=True)
class PartTree:
    """A binary tree of `depth` levels with 2**depth parts.

    `lines` [2**depth - 1, D] float32 and `thresholds` [2**depth - 1] float32 describe the nodes level by level. A point
    goes left if its dot product with the node's line is above the threshold.
    """

    lines: np.ndarray
    thresholds: np.ndarray

    @property
    def parts(self) -> int:
        """Number of leaves."""
        return len(self.thresholds) + 1


def grow_tree(sample: np.ndarray, parts: int, seed: int) -> PartTree:
    """Grow a tree that divides `sample` [S, D] into `parts` parts (a power of two), whose sizes differ by at most one.

    Each node is split by balanced 2-means. Raises ValueError if `parts` is not a power of two.
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
        order, across = halve(vectors, starts, left, sizes > 1, seed)
        vectors = vectors[order]
        scores = _project(vectors, across, np.repeat(np.arange(len(sizes)), sizes))
        middle = starts[:-1] + left
        last, first = (np.clip(place, 0, max(0, len(scores) - 1)) for place in (middle - 1, middle))
        between = (scores[last] + scores[first]) / 2 if len(scores) else np.zeros(len(sizes))
        lines.append(across)
        thresholds.append(between.astype(np.float32))
        starts = np.append(np.stack([starts[:-1], middle], axis=1).reshape(-1), len(vectors))
    return PartTree(np.concatenate(lines), np.concatenate(thresholds))


def assign_parts(tree: PartTree, vectors: np.ndarray, first: int) -> np.ndarray:
    """Return the part of each of `vectors` [n, D], the points [first, first + n), as int64 [n] in [0, parts).

    If a point lies exactly on a boundary, a bit of its number selects the side, so that equal points are spread over
    the parts.
    """
    vectors = np.ascontiguousarray(vectors, np.float32)
    node = np.zeros(len(vectors), np.int64)
    number = np.arange(first, first + len(vectors))
    level = 0
    while (1 << level) < tree.parts:
        above = _project(vectors, tree.lines, node) - tree.thresholds[node]
        right = (above < 0) | ((above == 0) & ((number >> level) & 1 == 1))
        node = 2 * node + 1 + right
        level += 1
    return node - (tree.parts - 1)


def _project(vectors: np.ndarray, lines: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Return the dot product x . lines[part of x] for every point, float32 [N]."""
    scores = np.empty(len(vectors), np.float32)
    for start in range(0, len(vectors), _ROWS):
        rows = slice(start, start + _ROWS)
        scores[rows] = np.einsum("nd,nd->n", vectors[rows], lines[part[rows]])
    return scores
