"""Exact nearest vectors, for any number of queries."""

import faiss
import numpy as np

_SCORES = 1 << 22  # held at once
_MANY = 1024  # queries from which Faiss's blocked search is the faster one; below, it takes up to six times as long
_MANY_ALONE = 8  # the same where Faiss has one thread: its caller is one of several


def nearest(queries: np.ndarray, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the `count` <= n best inner products of queries [B, D] with vectors [n, D], float32 both.

    Scores float32 [B, count], best first, and positions int64 [B, count]; equal scores in any order.
    """
    if len(queries) >= (_MANY if faiss.omp_get_max_threads() > 1 else _MANY_ALONE):
        return faiss.knn(queries, vectors, count, metric=faiss.METRIC_INNER_PRODUCT)  # type: ignore[no-any-return]
    scores = np.empty((len(queries), 0), np.float32)
    positions = np.empty((len(queries), 0), np.int64)
    step = max(4 * count, _SCORES // max(1, len(queries)))
    for start in range(0, len(vectors), step):
        block = queries @ vectors[start : start + step].T
        if scores.shape[1] < count:
            more, where = block, np.broadcast_to(np.arange(start, start + block.shape[1]), block.shape)
        else:
            more, where = _above(block, scores.min(axis=1), start)
        scores, positions = _best(np.hstack([scores, more]), np.hstack([positions, where]), count)
    order = np.argsort(-scores, axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(positions, order, 1)


def _above(block: np.ndarray, bound: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scores of block [B, n] above each row's bound [B], padded, and their positions from `start` on."""
    row, column = np.divmod(np.flatnonzero(block > bound[:, None]), block.shape[1])
    counts = np.bincount(row, minlength=len(block))
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    scores = np.full((len(block), counts.max(initial=0)), -np.inf, np.float32)
    positions = np.zeros(scores.shape, np.int64)
    scores[row, place] = block[row, column]
    positions[row, place] = start + column
    return scores, positions


def _best(scores: np.ndarray, positions: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` best of each row [B, n], or all of them, in any order."""
    if scores.shape[1] <= count:
        return scores, positions
    picked = np.argpartition(scores, scores.shape[1] - count, axis=1)[:, -count:]
    return np.take_along_axis(scores, picked, 1), np.take_along_axis(positions, picked, 1)
