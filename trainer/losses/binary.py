"""Binary cross-entropy over candidates: positives, hard and random negatives (ASTRA, equations 1 and 2)."""

from typing import Any

import numpy as np
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from trainer import kernels
from trainer.candidates import Candidates
from trainer.rows import RowMatrix
from trainer.scoring import pair_scores, sparse_product
from trainer.threads import PARTS, in_parts


def binary_cross_entropy(x: torch.Tensor, w: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """ASTRA's loss, equation (2), summed over the batch; with chunks of `candidates.label_range`, equation (1).

    x [B, D], w [C, D] = the classifier's rows `candidates.ids`:
    sum_P softplus(-s) + sum_H softplus(s) + sum_R weight * softplus(s), s = w.x, R without P and H.
    """
    return _BinaryCrossEntropy.apply(x, w, candidates)


@torch.no_grad()
def binary_step(
    x: torch.Tensor, rows: RowMatrix, candidates: Candidates, lr: float, step: int, scale: float
) -> tuple[float, torch.Tensor]:
    """`scale` times the loss of x [B, D] and its gradient on x; the rows `candidates.ids` have made their step by it.

    What gather, `binary_cross_entropy`, its backward pass and update do, in one pass over the rows: each is read once
    and written once, and no [C, D] is made. `rows` are in main memory.
    """
    pool = len(candidates.pool_weight)
    on_x, on_pool, loss = torch.zeros_like(x), x.new_empty(0, x.shape[1]), 0.0
    if pool:
        w = rows.gather(candidates.ids[:pool], step).detach()
        pool_loss, slopes = _pool_of(x, w, candidates)
        loss += float(pool_loss)
        on_x, on_pool = slopes @ w, (slopes.T @ x).mul_(scale)
    signed = np.where(candidates.pair_positive, -candidates.pair_weight, candidates.pair_weight)
    query, weight, starts = kernels.by_row(
        candidates.pair_label,
        candidates.pair_query.astype(np.int32, copy=False),
        signed.astype(np.float32, copy=False),
        len(candidates.ids),
    )
    parts = np.zeros((PARTS, *x.shape), np.float32)
    given = (
        *rows.compiled_step(lr, step),
        candidates.ids,
        query,
        weight,
        starts,
        on_pool.numpy(),
        x.numpy(),
    )
    losses = in_parts(
        lambda part, start, stop: kernels.binary_step(*given, np.float32(scale), parts[part], start, stop),
        len(candidates.ids),
    )
    return scale * (loss + sum(losses)), on_x.mul_(scale) + torch.from_numpy(parts.sum(0))


class _BinaryCrossEntropy(Function):
    """Loss and slopes in one pass; the slopes take the place of the scores in memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, candidates: Candidates) -> torch.Tensor:  # type: ignore[override]
        query, label = _on(x, candidates.pair_query), _on(x, candidates.pair_label)
        sign = _on(x, np.where(candidates.pair_positive, -1, 1)).to(x.dtype)
        weight = _on(x, candidates.pair_weight).to(x.dtype)
        margins = sign * pair_scores(x, w, query, label)
        pair_slopes = torch.sigmoid(margins).mul_(sign).mul_(weight)
        pool_loss, pool_slopes = _pool_of(x, w, candidates)
        ctx.save_for_backward(x, w, query, label, pair_slopes, pool_slopes)
        return torch.dot(softplus(margins), weight) + pool_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, w, query, label, pair_slopes, pool_slopes = ctx.saved_tensors
        pool = pool_slopes.shape[1]
        grad_x = sparse_product(query, label, pair_slopes, len(x), w, ascending=True).addmm_(pool_slopes, w[:pool])
        grad_w = sparse_product(label, query, pair_slopes, len(w), x)
        grad_w[:pool].addmm_(pool_slopes.T, x)
        return grad_x.mul_(grad), grad_w.mul_(grad), None


def _pool_of(x: torch.Tensor, w: torch.Tensor, candidates: Candidates) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss on the shared pool, the first R rows of w, and its slopes by score [B, R]."""
    weight = _on(x, candidates.pool_weight).to(x.dtype)
    scores = x @ w[: len(weight)].T
    struck = _on(x, candidates.struck_query), _on(x, candidates.struck_pool)
    scores[struck] = -torch.inf  # softplus and its slope are then exactly 0
    loss = torch.dot(softplus(scores).sum(0), weight)
    return loss, scores.sigmoid_().mul_(weight)


def _on(x: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(x.device)
