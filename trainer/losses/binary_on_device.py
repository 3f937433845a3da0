"""A step of binary cross-entropy on a device, which nothing waits for."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import softplus

from trainer.losses.candidate_scores import masked_scores
from trainer.rows.by_label import PairsByQuery, merge_labels, order_pairs
from trainer.rows.host_matrix import HostMatrix
from trainer.rows.kernels import Rule
from trainer.rows.matrix import RowMatrix, operations_of
from trainer.stream.batch import Candidates, DrawnLabels
from trainer.stream.transfer import send


class _Pool(NamedTuple):
    """Weights of the shared pool [R] float32, and the places (query, column) [m] where it is masked."""

    weight: Any
    query: Any
    column: Any


class _Sent(NamedTuple):
    """Arrays that a step needs on a device."""

    ids: Any
    pool: _Pool
    pairs: PairsByQuery


def step_on_device(
    x: torch.Tensor,
    rows: RowMatrix | HostMatrix,
    candidates: Candidates | DrawnLabels,
    lr: float,
    step: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `binary.binary_step`: scores of pairs by query, then gradients and updates by row."""
    x = x.contiguous()
    if isinstance(candidates, DrawnLabels):
        assert isinstance(rows, RowMatrix)
        return _step_on_drawn(x, rows, candidates, rows.rule(lr, step), scale)
    made, operations = rows.begin(candidates.ids, lr, step), operations_of(rows.device)
    sent = send(_Sent(made.places, pool_arrays(candidates), pair_arrays(candidates)), rows.device)  # one copy for all
    ids, (weight, query, column) = sent.ids, sent.pool
    pairs = order_pairs(sent.pairs, len(x), len(ids))
    losses, slopes, on_x = operations.score_pairs(x, made.scored, ids, pairs, scale)
    loss, on_pool = losses.sum(dtype=torch.float64), x.new_empty(0, x.shape[1])
    if len(weight):
        w = made.scored.vectors.index_select(0, ids[: len(weight)]).float()
        pool_loss, pool_slopes = differentiate_pool(x, w, weight, query, column)
        loss = loss + pool_loss
        on_x, on_pool = on_x.addmm_(pool_slopes, w, alpha=scale), (pool_slopes.T @ x).mul_(scale)
    operations.update_rows(made.updated, made.rule, ids, on_pool, pairs, slopes, x)
    rows.end(candidates.ids, made, lr, step)
    return loss * scale, on_x


def _step_on_drawn(
    x: torch.Tensor, rows: RowMatrix, drawn: DrawnLabels, rule: Rule, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same with labels that the device merges first."""
    if not len(drawn.label):
        return x.new_zeros((), dtype=torch.float64), torch.zeros_like(x)
    matrix, operations = rows.device_matrix(), operations_of(rows.device)
    ids, pairs = merge_labels(send(replace(drawn, hard=None), rows.device), drawn.hard)
    losses, slopes, on_x = operations.score_pairs(x, matrix, ids, pairs, scale)
    operations.update_rows(matrix, rule, ids, x.new_empty(0, x.shape[1]), pairs, slopes, x)
    return losses.sum(dtype=torch.float64) * scale, on_x


def pool_arrays(candidates: Candidates) -> _Pool:
    """Return what the shared pool of candidates is made of."""
    return _Pool(candidates.pool_weight, candidates.masked_query, candidates.masked_pool)


def pair_arrays(candidates: Candidates) -> PairsByQuery:
    """Return the pairs of candidates."""
    query, label = (part.astype(np.int32, copy=False) for part in (candidates.pair_query, candidates.pair_label))
    return PairsByQuery(query, label, candidates.pair_positive, candidates.pair_weight)


def differentiate_pool(
    x: torch.Tensor, w: torch.Tensor, weight: torch.Tensor, query: torch.Tensor, column: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss on the shared pool w [R, D], and its slopes by score [B, R]; both are 0 where masked."""
    scores, weight = masked_scores(x, w, query, column), weight.to(x.dtype)
    loss = torch.dot(softplus(scores).sum(0), weight)
    return loss, scores.sigmoid_().mul_(weight)
