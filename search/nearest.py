"""Find exact nearest vectors, with Faiss on a CPU and with PyTorch on a GPU. PyTorch is imported only for a GPU.

Products are computed in float32.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from schemas.errors import InputError

CPU = "cpu"
_DRIVER = Path("/dev/nvidiactl")
_SCORES = 1 << 20  # scores in memory at a time
_SCORES_ON_DEVICE = 1 << 28  # 1 GiB
_MANY = 1024  # Faiss's blocked search is faster from this number of queries on; below, it is up to six times slower
_MANY_ALONE = 8  # the same if Faiss uses one thread, because several threads call Faiss
_WIDENED = 1 << 21  # half-precision numbers that are widened at a time


def nearest(queries: np.ndarray, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the best `count` <= n inner products of queries float32 [B, D] with vectors [n, D], float32 or float16.

    Returns scores float32 [B, count], best first, and positions int64 [B, count]; equal scores are in any order.
    """
    import faiss  # not needed for a search on a GPU

    many = len(queries) >= (_MANY if faiss.omp_get_max_threads() > 1 else _MANY_ALONE)
    if many and vectors.dtype == np.float32:
        return faiss.knn(queries, vectors, count, metric=faiss.METRIC_INNER_PRODUCT)  # type: ignore[no-any-return]
    scores = np.empty((len(queries), 0), np.float32)
    positions = np.empty((len(queries), 0), np.int64)
    most = len(vectors) if vectors.dtype == np.float32 else _WIDENED // vectors.shape[1]
    step = max(4 * count, most if many else min(most, _SCORES // max(1, len(queries))))
    for start, rows in iterate_float32(vectors, step):
        if many:
            best = faiss.knn(queries, rows, min(count, len(rows)), metric=faiss.METRIC_INNER_PRODUCT)
            scores, positions = _best(np.hstack([scores, best[0]]), np.hstack([positions, best[1] + start]), count)
            continue
        block = queries @ rows.T
        if scores.shape[1] < count:
            more, where = block, np.broadcast_to(np.arange(start, start + block.shape[1]), block.shape)
        else:
            more, where = _above(block, scores.min(axis=1), start)
        scores, positions = _best(np.hstack([scores, more]), np.hstack([positions, where]), count)
    order = np.argsort(-scores, axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(positions, order, 1)


def iterate_float32(vectors: np.ndarray, rows: int = 0) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, float32 rows [n, D]) of vectors [N, D], `rows` rows at a time.

    With `rows` = 0, float32 vectors are yielded all at once, and float16 vectors in parts.
    """
    step = rows or (len(vectors) if vectors.dtype == np.float32 else _WIDENED // vectors.shape[1])
    for start in range(0, len(vectors), max(1, step)):
        yield start, vectors[start : start + step].astype(np.float32, copy=False)


def _above(block: np.ndarray, bound: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scores of block [B, n] above each row's bound [B], padded, and their positions, counted from `start`."""
    row, column = np.divmod(np.flatnonzero(block > bound[:, None]), block.shape[1])
    counts = np.bincount(row, minlength=len(block))
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    scores = np.full((len(block), counts.max(initial=0)), -np.inf, np.float32)
    positions = np.zeros(scores.shape, np.int64)
    scores[row, place] = block[row, column]
    positions[row, place] = start + column
    return scores, positions


def _best(scores: np.ndarray, positions: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` best scores of each row [B, n] (all if n is smaller) and their positions, in any order."""
    if scores.shape[1] <= count:
        return scores, positions
    picked = np.argpartition(scores, scores.shape[1] - count, axis=1)[:, -count:]
    return np.take_along_axis(scores, picked, 1), np.take_along_axis(positions, picked, 1)


def find_device(name: str) -> str:
    """Return `cpu` or `cuda:N` for auto, cpu, cuda or cuda:N. Raises InputError if the device does not exist."""
    if name == CPU or (name == "auto" and not _DRIVER.exists()):
        return CPU
    try:
        import torch
    except ImportError:
        gpus = 0
    else:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto" and not gpus:
        return CPU
    number = name.partition(":")[2]
    index = int(number) if number else int(os.environ.get("LOCAL_RANK", "0")) % max(1, gpus)
    if index >= gpus:
        raise InputError(f"device {name!r}: PyTorch can use {gpus} GPUs on this machine. Give --device auto or cpu.")
    return f"cuda:{index}"


class DeviceVectors:
    """`vectors` float32 [n, D] on a device."""

    def __init__(self, vectors: np.ndarray, device: str) -> None:
        import torch

        self._torch: Any = torch
        self._vectors = torch.from_numpy(np.ascontiguousarray(vectors)).to(device)

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Same as the function `nearest`.

        Results may differ from results on a CPU by rounding errors, which `search.block` removes.
        """
        torch, vectors = self._torch, self._vectors
        x = torch.from_numpy(np.ascontiguousarray(queries)).to(vectors.device)
        scores = x.new_empty(len(x), 0)
        positions = torch.empty(len(x), 0, dtype=torch.int64, device=x.device)
        step = max(count, _SCORES_ON_DEVICE // max(1, len(x)))
        for start in range(0, len(vectors), step):
            block = x @ vectors[start : start + step].T
            best, places = block.topk(min(count, block.shape[1]), dim=1)
            # the best scores of the earlier blocks [B, count], next to the scores of this block
            scores, positions = torch.cat([scores, best], 1), torch.cat([positions, places + start], 1)
            scores, order = scores.topk(min(count, scores.shape[1]), dim=1)
            positions = positions.gather(1, order)
        return scores.cpu().numpy(), positions.cpu().numpy()
