"""Scores of (query, label) pairs without materialising [pairs, D] twice: gather forward, sparse products backward."""

from typing import Any

import numpy as np
import torch
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable


class _PairScores(Function):
    """s_n = x[query_n] . w[label_n]; the gradients are two sparse-dense products."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, w: torch.Tensor, query: torch.Tensor, label: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, w, query, label)
        scores = torch.empty(len(query), dtype=x.dtype)
        # In slices that stay in cache: the two gathers are the cost.
        for start in range(0, len(query), 4096):
            part = slice(start, start + 4096)
            torch.sum(x[query[part]] * w[label[part]], dim=1, out=scores[part])
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, w, query, label = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_x = sparse_product(query, label, grad, len(x), w)
        grad_w = sparse_product(label, query, grad, len(w), x)
        return grad_x, grad_w, None, None


def sparse_product(
    row: torch.Tensor, column: torch.Tensor, value: torch.Tensor, rows: int, dense: torch.Tensor
) -> torch.Tensor:
    """[rows, D] = A @ dense, where A has `value` at (row, column); repeated entries add up. Rows in any order."""
    order = torch.argsort(row, stable=True)
    starts = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(row, minlength=rows), 0, out=starts[1:])
    # A weighted sum of gathered rows per output row, in a fixed order: the same bits at every run.
    return torch.nn.functional.embedding_bag(
        column[order], dense, starts, mode="sum", per_sample_weights=value[order], include_last_offset=True
    )


def pair_scores(x: torch.Tensor, w: torch.Tensor, query: np.ndarray, label: np.ndarray) -> torch.Tensor:
    """Scores [n] of x [B, D] rows `query` against w [C, D] rows `label`."""
    return _PairScores.apply(x, w, torch.from_numpy(query), torch.from_numpy(label))
