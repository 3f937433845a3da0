"""Exact best k of inner products, by PyTorch on any device: equal scores by id, NaN an error.

The scores are those of PyTorch's matrix product, whose last bits depend on its shape.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from schemas import PAD
from schemas.errors import DivergedError
from search import NOT_A_NUMBER

_SCORES = 1 << 28  # scores in memory at a time: 1 GiB
_SORTED = 1 << 24  # scores that are sorted at a time, in rows whose last places tie
Scored = tuple[torch.Tensor, torch.Tensor]  # scores [B, k], best first, and ids int64 [B, k]


class Rows(Protocol):
    """Rows [L, D], indexed by a slice or by ids int64 [m]: a tensor, or mapped files."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> torch.Tensor: ...


def top_of_block(scores: torch.Tensor, k: int) -> Scored:
    """Return the k greatest values in each row of `scores` [B, R], and their columns, both [B, k]; ties by column."""
    width = scores.shape[1]
    values, columns = scores.topk(min(k + 1, width), dim=1)
    # topk may keep any of several equal scores; the choice matters only if the cut at k falls between equals.
    tied = values[:, k - 1] == values[:, k] if 0 < k < width else scores.new_zeros(len(scores), dtype=torch.bool)
    cut = tied.nonzero().flatten()
    columns = columns[:, :k]
    for some in cut.split(max(1, _SORTED // max(1, width))):
        columns[some] = scores[some].sort(dim=1, descending=True, stable=True).indices[:, :k]
    columns, _ = columns.sort(dim=1)
    values, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def top_of_product(queries: torch.Tensor, rows: torch.Tensor, k: int) -> Scored:
    """Return each query's k greatest products with `rows` [R, D], k <= R, and the row numbers, as `top_of_block`."""
    return top_of_block(queries @ rows.T, k)


@torch.no_grad()
def top_k(
    queries: torch.Tensor,
    vectors: Rows,
    k: int,
    block_rows: int = 1 << 16,
    among: torch.Tensor | None = None,
    top: Callable[[torch.Tensor, torch.Tensor, int], Scored] = top_of_product,
) -> Scored:
    """Find the k greatest inner products of each query: [B, D], vectors [L, D] -> scores [B, k], ids [B, k] int64.

    Results are sorted best first, equal scores by ascending id, and padded with -inf and -1 if k > L. Blocks of
    `block_rows` vectors are moved to the queries' device and converted to at least float32, so memory is [B,
    block_rows] and vectors may be half precision or memory-mapped. `among` [C] int64, ascending: the only vectors to
    search; None: all. `top` finds the best of one block. Raises ExtremisError if a score is NaN or infinite.
    """
    dtype = torch.promote_types(queries.dtype, torch.float32)
    queries = queries.to(dtype)
    scores = queries.new_empty((len(queries), 0))
    ids = torch.empty((len(queries), 0), dtype=torch.int64, device=queries.device)
    for start in range(0, len(vectors if among is None else among), block_rows):
        part = slice(start, start + block_rows)
        block = vectors[part if among is None else among[part]].to(device=queries.device, dtype=dtype)
        block_scores, block_ids = top(queries, block, min(k, len(block)))
        # Earlier blocks have lower ids: a stable sort by score alone keeps the order of ties.
        scores = torch.cat([scores, block_scores], dim=1)
        ids = torch.cat([ids, block_ids + start], dim=1)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        scores, ids = scores[:, :k], ids.gather(1, order[:, :k])
    if not scores.isfinite().all():
        raise DivergedError(NOT_A_NUMBER)
    ids = ids if among is None else among.to(ids.device)[ids]
    missing = (0, k - scores.shape[1])
    return (
        torch.nn.functional.pad(scores, missing, value=-torch.inf),
        torch.nn.functional.pad(ids, missing, value=PAD),
    )


class DeviceVectors:
    """`vectors` float32 [n, D] on a device, for search/topk.py, which scores what is found again on the CPU."""

    def __init__(self, vectors: np.ndarray, device: str) -> None:
        self._vectors = torch.from_numpy(np.ascontiguousarray(vectors)).to(device)

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the best `count` <= n products of queries [B, D]: scores and positions [B, count], best first."""
        x = torch.from_numpy(np.ascontiguousarray(queries)).to(self._vectors.device)
        scores, positions = top_k(x, self._vectors, count, max(count, _SCORES // max(1, len(x))))
        return scores.cpu().numpy(), positions.cpu().numpy()


def count_gpus() -> int:
    """Count the GPUs that PyTorch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
