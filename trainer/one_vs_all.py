"""One-vs-all (binary cross-entropy): its loss, and a step that scores and updates each row in a single pass."""

from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import softplus

from trainer.device import on_copy_stream, product, products_with, send
from trainer.losses import Loss, LossParts, Scores, masked_scores
from trainer.methods.kinds import LossSection
from trainer.rows import numba_kernels, torch_kernels
from trainer.rows.kernels import kernels_of
from trainer.rows.matrix import HostMatrix, RowMatrix
from trainer.rows.torch_kernels import DevicePairs, merge_labels, order_pairs
from trainer.stream.batch import Candidates
from trainer.threads import RANGES, map_ranges

Merged = tuple[torch.Tensor, DevicePairs]  # what `merge_labels` returns: ids [n], padded at the end, and pairs


class OneVsAll(Loss):
    """sum_P softplus(-s) + sum_H softplus(s) + sum_R weight * softplus(s), where R excludes P and H; s = x . w.

    This is ASTRA's equation (2) with the candidates of a batch, whose margins are added to s. With chunks of all labels
    (`candidates.label_range`) it is ASTRA's equation (1) and DEXML's equation (2). Each score contributes
    independently, so ranks exchange no data.
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
    candidates: Candidates,
    lr: float,
    step: int,
    scale: float,
    merged: Merged | None = None,
    narrow: bool = False,
) -> tuple[float | torch.Tensor, torch.Tensor]:
    """Update the rows of `candidates` at step `step`; return `scale` times the loss of x [B, D], and its gradient on x.

    The result is the same as gathering rows, calling `binary_cross_entropy`, its backward pass, and an update. A single
    pass over the rows reads and writes each row once, and creates no matrix [C, D] except for a shared pool. The loss
    is a float from compiled loops on a CPU, else a tensor []. `merged`: the result of `merge_ahead`, if it was called.
    With `narrow`, a GPU multiplies a pool's bfloat16 rows as they are, without widening them to float32.
    """
    if isinstance(rows, HostMatrix) or not rows.compiled:
        return _step_on_device(x.contiguous(), rows, candidates, lr, step, scale, merged, narrow)
    # The pool, by dense products: the gradient on_x [B, D] without `scale`, and on_pool [R, D] with it.
    pool = len(candidates.pool_weight)
    on_x, on_pool, pool_loss = torch.zeros_like(x), x.new_empty(0, x.shape[1]), 0.0
    if pool:
        w = rows.gather(candidates.ids[:pool]).detach()
        masked = torch.from_numpy(candidates.masked_query), torch.from_numpy(candidates.masked_pool)
        scores = masked_scores(x, w, *masked, float(candidates.pool_margin))
        weight = torch.from_numpy(candidates.pool_weight).to(x.dtype)
        loss_of_pool, slopes = torch_kernels.differentiate_pool(scores, weight, x.dtype)
        on_x, on_pool, pool_loss = slopes @ w, (slopes.T @ x).mul_(scale), float(loss_of_pool)
    # The pairs, sorted by label; each range of labels has its own gradient on x, added up at the end.
    signed = np.where(candidates.pair_positive, -candidates.pair_weight, candidates.pair_weight)
    signed, labels, margin = signed.astype(np.float32, copy=False), len(candidates.ids), candidates.pair_margin
    pair_query = candidates.pair_query.astype(np.int32, copy=False)
    query, weight, starts = numba_kernels.by_row(candidates.pair_label, pair_query, signed, labels)
    if len(margin):
        _, margin, _ = numba_kernels.by_row(candidates.pair_label, pair_query, margin, labels)
    on_x_of_range = np.zeros((RANGES, *x.shape), np.float32)
    matrix, rule = rows.compiled_step(lr, step)
    pairs = numba_kernels.Pairs(query, weight, margin, starts)

    def step_on(number: int, start: int, stop: int) -> float:
        queries = numba_kernels.Queries(x.numpy(), on_x_of_range[number], np.float32(scale))
        loss: float = numba_kernels.binary_step(
            matrix, rule, candidates.ids, pairs, queries, on_pool.numpy(), (start, stop)
        )
        return loss

    losses = map_ranges(step_on, len(candidates.ids))
    return scale * (pool_loss + sum(losses)), on_x.mul_(scale) + torch.from_numpy(on_x_of_range.sum(0))


def merge_ahead(candidates: Candidates, device: torch.device) -> Merged | None:
    """Merge the candidates' `drawn` labels on the device; None if there are none to merge.

    The merge runs beside the device's other work, unless this work is to find the hard negatives.
    """
    drawn = candidates.drawn
    if drawn is None or not len(drawn.label):
        return None
    if drawn.hard is not None:
        return merge_labels(send(replace(drawn, hard=None), device), drawn.hard)
    with on_copy_stream(device) as hand_over:
        return hand_over(merge_labels(send(drawn, device)))


def _step_on_device(
    x: torch.Tensor,
    rows: RowMatrix | HostMatrix,
    candidates: Candidates,
    lr: float,
    step: int,
    scale: float,
    merged: Merged | None,
    narrow: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `binary_step` without waiting for the device: first score all pairs, then update all rows."""
    device_step, kernels = rows.begin(candidates.ids, lr, step), kernels_of(rows.device)
    if candidates.drawn is None:
        sent = send(candidates._replace(ids=device_step.places), rows.device)
        ids, pairs, weight = sent.ids, order_pairs(sent, len(x), len(candidates.ids)), sent.pool_weight
    elif merged := merged or merge_ahead(candidates, rows.device):
        ids, pairs = merged
        weight = ids[:0]
    else:
        return x.new_zeros((), dtype=torch.float64), torch.zeros_like(x)  # no query has a label
    losses, slopes, on_x = kernels.score_pairs(x, device_step.scored, ids, pairs, scale)
    loss, on_pool = losses.sum(dtype=torch.float64) * scale, x.new_empty(0, x.shape[1])
    if len(weight):
        w = device_step.scored.vectors.index_select(0, ids[: len(weight)])
        w = w if narrow and w.dtype == torch.bfloat16 else w.float()
        with products_with(device_step.scored.vectors):
            scores = product(x.to(w.dtype), w.T)
            scores[sent.masked_query, sent.masked_pool] = -torch.inf
            if candidates.pool_margin:
                scores += float(candidates.pool_margin)
            pool_loss, pool_slopes = kernels.differentiate_pool(scores, weight * scale, w.dtype)
            loss = loss + pool_loss
            on_x, on_pool = on_x.add_(product(pool_slopes, w)), product(pool_slopes.T, x.to(w.dtype))
    kernels.update_rows(device_step.updated, device_step.rule, ids, on_pool, (pairs, slopes, x))
    rows.end(candidates.ids, device_step, lr, step)
    return loss, on_x
