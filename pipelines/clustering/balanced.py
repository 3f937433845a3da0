"""Balanced hierarchical k-means: points halved again and again, into clusters of equal size (NGAME, appendix C).

All parts of one level are halved together: a pass over the points for each of a few rounds, and log2(N / C) levels, so
O(N D log(N / C)). No sum depends on threads.
"""

import itertools

import numpy as np

from schemas.randomness import Purpose, generator

_ROUNDS = 8  # of 2-means a level; most parts settle in fewer


def balanced_clusters(vectors: np.ndarray, size: int, seed: int = 0, rounds: int = _ROUNDS) -> np.ndarray:
    """Return the cluster of each of `vectors` [N, D]: numbers [0, K), int64 [N], with K = ceil(N / size).

    Clusters have floor(N / K) or ceil(N / K) points. Their numbers follow the tree: 2 i and its neighbours are near.
    A function of (vectors, size, seed) alone. Raises ValueError for a size below 1.
    """
    order, starts = balanced_order(vectors, size, size, seed, rounds)
    clusters = np.empty(len(vectors), np.int64)
    clusters[order] = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return clusters


def balanced_order(
    vectors: np.ndarray, size: int, smallest: int, seed: int = 0, rounds: int = _ROUNDS
) -> tuple[np.ndarray, np.ndarray]:
    """Return points cluster after cluster, int64 [N], and the start of each cluster, [K + 1]: see `balanced_clusters`.

    Clusters of ceil(N / K) points come before those of one less. Within each, halves are laid out as the tree would
    divide it further, down to `smallest` points: part i of m equal ones is [i n // m, (i + 1) n // m) of its n points.
    """
    if size < 1 or smallest < 1:
        raise ValueError(f"clusters of {size} points, and parts of {smallest}; expected 1 or more")
    count = len(vectors)
    vectors = np.ascontiguousarray(vectors, np.float32)
    order = np.arange(count)  # points, part after part
    # Parts: where each starts, and how many clusters it is to become.
    starts, clusters = np.array([0, count]), np.array([-(-count // size)])
    while clusters.max(initial=0) > 1:
        left = (clusters + 1) // 2
        sizes = _left_sizes(np.diff(starts), clusters, left)
        order = order[halved(vectors[order], starts, sizes, clusters > 1, seed, rounds)[0]]
        middle = starts[:-1] + sizes
        halves = np.stack([middle, starts[1:]], axis=1).reshape(-1)
        counts = np.stack([left, clusters - left], axis=1).reshape(-1)
        kept = counts > 0  # a part that is one cluster already has no right half
        starts, clusters = np.concatenate([[0], halves[kept]]), counts[kept]
    parts, edges = 2, starts
    while parts * smallest <= size and count:
        points = np.diff(starts)[:, None]
        inner = starts[:-1, None] + np.arange(parts) * points // parts
        finer = np.append(inner.reshape(-1), count)
        sizes = np.diff(finer)[0::2]
        order = order[halved(vectors[order], edges, sizes, np.diff(edges) > 1, seed, rounds)[0]]
        parts, edges = 2 * parts, finer
    return order, starts


def _left_sizes(points: np.ndarray, clusters: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Count the points of left halves that become `left` clusters: all leaves of a part are equal within one."""
    base, larger = points // clusters, points % clusters
    return base * left + np.minimum(larger, left)


def halved(
    vectors: np.ndarray, starts: np.ndarray, left: np.ndarray, divided: np.ndarray, seed: int, rounds: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the order [N] that lays each part's left half before its right one: balanced 2-means within every part.

    `vectors` [N, D] part after part. A point's rank along the line through both centroids decides, which is the best
    assignment with these sizes: the sum of squared distances to c1 or c2 is least where x.(c1 - c2) is largest.
    Returns these lines [P, D], too.
    """
    sizes = np.diff(starts)
    part = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(part)) - starts[:-1][part]
    goes_left = within < left[part]
    # Two of a part's points, drawn: their difference is the first line.
    draw = generator(seed, Purpose.CLUSTER_LINES, len(sizes))
    two = starts[:-1, None] + (draw.random((len(sizes), 2)) * sizes[:, None]).astype(np.int64)
    two = np.minimum(two, max(0, len(part) - 1))  # of a part without points
    lines = vectors[two[:, 0]] - vectors[two[:, 1]]
    order, scores = np.arange(len(part)), np.empty(len(part), np.float32)
    for last in range(rounds - 1, -1, -1):
        for number, (low, high) in enumerate(itertools.pairwise(starts.tolist())):
            np.einsum("nd,d->n", vectors[low:high], lines[number], out=scores[low:high])
        # Ties stay in their order, and so does all of a part that is not divided.
        scores[~divided[part]] = 0
        new = np.lexsort((-scores, part))
        moved = np.zeros(len(part), bool)
        moved[new[goes_left]] = True
        before = np.zeros(len(part), bool)
        before[order[goes_left]] = True
        order = new
        if not last or np.array_equal(moved, before):
            break
        lines = _means(vectors, order, starts, left)
    return order, lines


def _means(vectors: np.ndarray, order: np.ndarray, starts: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Return c1 - c2 of each part's halves in `order`, float32 [P, D]."""
    edges = np.append(np.stack([starts[:-1], starts[:-1] + left], axis=1).reshape(-1), starts[-1])
    means = np.zeros((len(edges) - 1, vectors.shape[1]))
    for half, (low, high) in enumerate(itertools.pairwise(edges.tolist())):
        if high > low:  # `np.add.reduceat` over all halves takes ten times as long
            np.add.reduce(vectors[order[low:high]], axis=0, dtype=np.float64, out=means[half])
            means[half] /= high - low
    return (means[0::2] - means[1::2]).astype(np.float32)
