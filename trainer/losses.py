"""Losses over candidate scores. Each returns the sum over queries; callers divide by the global batch size."""

import numpy as np
import torch
from torch.nn.functional import softplus

from trainer.candidates import Candidates
from trainer.scoring import pair_scores


def binary_cross_entropy(x: torch.Tensor, w: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """ASTRA's loss, equation (2), summed over the batch; with `candidates.label_range` chunks, equation (1).

    x [B, D], w [C, D] = the classifier's rows `candidates.ids`:
    sum_P softplus(-s) + sum_H softplus(s) + sum_R weight * softplus(s), s = w.x, R without P and H.
    """
    total = x.new_zeros(())
    if len(candidates.pair_query):
        scores = pair_scores(x, w, candidates.pair_query, candidates.pair_label)
        sign = torch.from_numpy(np.where(candidates.pair_positive, -1.0, 1.0)).to(x.dtype)
        weight = torch.from_numpy(candidates.pair_weight).to(x.dtype)
        total = total + torch.dot(softplus(sign * scores), weight)
    if len(candidates.pool):
        total = total + _pool_loss(x, w, candidates)
    return total


def _pool_loss(x: torch.Tensor, w: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    pool = w if len(candidates.pool) == len(w) else w[torch.from_numpy(candidates.pool)]
    return _PoolLoss.apply(
        x,
        pool,
        torch.from_numpy(candidates.pool_weight).to(x.dtype),
        torch.from_numpy(candidates.struck_query),
        torch.from_numpy(candidates.struck_pool),
    )


class _PoolLoss(torch.autograd.Function):
    """sum_b sum_r weight_r softplus(x_b . w_r) over pairs not struck; the slopes replace the scores in memory."""

    @staticmethod
    def forward(ctx, x, w, weight, struck_query, struck_pool):  # type: ignore[no-untyped-def, override]
        scores = x @ w.T
        scores[struck_query, struck_pool] = -torch.inf  # softplus and its slope are then exactly 0
        loss = torch.dot(softplus(scores).sum(0), weight)
        ctx.save_for_backward(x, w, torch.sigmoid_(scores).mul_(weight))
        return loss

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def, override]
        x, w, slope = ctx.saved_tensors
        return (slope @ w).mul_(grad), (slope.T @ x).mul_(grad), None, None, None
