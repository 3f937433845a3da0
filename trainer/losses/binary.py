"""Binary cross-entropy over candidates: positives, hard and random negatives (ASTRA, equations 1 and 2)."""

from typing import Any

import numpy as np
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from trainer.candidates import Candidates
from trainer.scoring import pair_scores, sparse_product


def binary_cross_entropy(x: torch.Tensor, w: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """ASTRA's loss, equation (2), summed over the batch; with chunks of `candidates.label_range`, equation (1).

    x [B, D], w [C, D] = the classifier's rows `candidates.ids`:
    sum_P softplus(-s) + sum_H softplus(s) + sum_R weight * softplus(s), s = w.x, R without P and H.
    """
    return _BinaryCrossEntropy.apply(x, w, candidates)


class _BinaryCrossEntropy(Function):
    """Loss and slopes in one pass; the slopes take the place of the scores in memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, candidates: Candidates) -> torch.Tensor:  # type: ignore[override]
        query, label = torch.from_numpy(candidates.pair_query), torch.from_numpy(candidates.pair_label)
        sign = torch.from_numpy(np.where(candidates.pair_positive, -1, 1)).to(x.dtype)
        weight = torch.from_numpy(candidates.pair_weight).to(x.dtype)
        margins = sign * pair_scores(x, w, query, label)
        loss = torch.dot(softplus(margins), weight)
        pair_slopes = torch.sigmoid(margins).mul_(sign).mul_(weight)

        pool_weight = torch.from_numpy(candidates.pool_weight).to(x.dtype)
        scores = x @ w[: len(pool_weight)].T
        struck = torch.from_numpy(candidates.struck_query), torch.from_numpy(candidates.struck_pool)
        scores[struck] = -torch.inf  # softplus and its slope are then exactly 0
        loss = loss + torch.dot(softplus(scores).sum(0), pool_weight)
        pool_slopes = scores.sigmoid_().mul_(pool_weight)

        ctx.save_for_backward(x, w, query, label, pair_slopes, pool_slopes)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, w, query, label, pair_slopes, pool_slopes = ctx.saved_tensors
        pool = pool_slopes.shape[1]
        grad_x = sparse_product(query, label, pair_slopes, len(x), w).addmm_(pool_slopes, w[:pool])
        grad_w = sparse_product(label, query, pair_slopes, len(w), x)
        grad_w[:pool].addmm_(pool_slopes.T, x)
        return grad_x.mul_(grad), grad_w.mul_(grad), None
