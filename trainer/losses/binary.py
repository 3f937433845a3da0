"""Binary cross-entropy over candidates: positives, hard and random negatives (ASTRA, equations 1 and 2)."""

import numpy as np
import torch
from torch.nn.functional import softplus

from trainer.device import CPU
from trainer.losses.base import Loss, LossParts
from trainer.losses.binary_on_device import differentiate_pool, pool_arrays, step_on_device
from trainer.losses.candidate_scores import Scores
from trainer.methods.kinds import LossSection
from trainer.rows import kernels
from trainer.rows.host_matrix import HostMatrix
from trainer.rows.matrix import RowMatrix
from trainer.rows.threads import PARTS, in_parts
from trainer.stream.batch import Candidates, DrawnLabels


class OneVsAll(Loss):
    """sum_P softplus(-s) + sum_H softplus(s) + sum_R weight * softplus(s), R without P and H.

    ASTRA's equation (2) with the candidates of a batch; with chunks of `candidates.label_range` its equation (1), which
    is DEXML's (2). Every score is for itself, so ranks need no exchange.
    """

    def differentiate(self, scores: Scores) -> LossParts:
        margin = torch.where(scores.positive, -scores.pair, scores.pair)
        slopes = torch.sigmoid(margin) * scores.weight
        value = softplus(margin) @ scores.weight
        for columns, s in scores.blocks():
            value = value + softplus(s).sum(0) @ scores.pool_weight[columns]
        return LossParts(
            value,
            torch.where(scores.positive, -slopes, slopes),
            lambda columns, s: s.sigmoid_().mul_(scores.pool_weight[columns]),
        )


binary_cross_entropy = OneVsAll(LossSection())


@torch.no_grad()
def binary_step(
    x: torch.Tensor,
    rows: RowMatrix | HostMatrix,
    candidates: Candidates | DrawnLabels,
    lr: float,
    step: int,
    scale: float,
) -> tuple[float | torch.Tensor, torch.Tensor]:
    """Update the rows `candidates.ids`; return `scale` times the loss of x [B, D], and its gradient on x.

    The same as gather, `binary_cross_entropy`, its backward pass and update, in one pass over the rows: each is read
    once and written once, and no [C, D] is made but of a shared pool. The loss is a float, on a GPU a tensor [].
    """
    if isinstance(rows, HostMatrix) or rows.device != CPU:
        return step_on_device(x, rows, candidates, lr, step, scale)
    assert isinstance(candidates, Candidates)
    pool = len(candidates.pool_weight)
    on_x, on_pool, loss = torch.zeros_like(x), x.new_empty(0, x.shape[1]), 0.0
    if pool:
        w = rows.gather(candidates.ids[:pool]).detach()
        pool_loss, slopes = differentiate_pool(x, w, *map(torch.from_numpy, pool_arrays(candidates)))
        loss += float(pool_loss)
        on_x, on_pool = slopes @ w, (slopes.T @ x).mul_(scale)
    signed = np.where(candidates.pair_positive, -candidates.pair_weight, candidates.pair_weight)
    query, weight, starts = kernels.by_row(
        candidates.pair_label,
        candidates.pair_query.astype(np.int32, copy=False),
        signed.astype(np.float32, copy=False),
        len(candidates.ids),
    )
    on_x_parts = np.zeros((PARTS, *x.shape), np.float32)
    matrix, rule = rows.compiled_step(lr, step)
    pairs, queries = kernels.Pairs(query, weight, starts), x.numpy()

    def step_on(part: int, start: int, stop: int) -> float:
        into = kernels.Queries(queries, on_x_parts[part], np.float32(scale))
        loss: float = kernels.binary_step(matrix, rule, candidates.ids, pairs, into, on_pool.numpy(), (start, stop))
        return loss

    losses = in_parts(step_on, len(candidates.ids))
    return scale * (loss + sum(losses)), on_x.mul_(scale) + torch.from_numpy(on_x_parts.sum(0))
