"""The losses query by query and term by term in float64, with torch's autograd: the reference of the fast ones."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import brentq
from torch.nn.functional import softplus

from tests.builders import Rows
from trainer.stream.batch import NO_MARGINS, Candidates, Margins


@dataclass(frozen=True)
class Row:
    """One query: scores and weights of its negatives, scores and weights of its positives, and these in the pool."""

    negative: torch.Tensor
    weight: torch.Tensor
    positive: torch.Tensor
    value: torch.Tensor
    pooled: torch.Tensor


def rows_of(
    x: torch.Tensor, w: torch.Tensor, candidates: Candidates, temperature: float, margins: Margins, hard: Rows
) -> list[Row]:
    scores = x @ w.T / temperature
    pool = len(candidates.pool_weight)
    masked = set(zip(candidates.masked_query.tolist(), candidates.masked_pool.tolist(), strict=True))
    rows = []
    for query in range(len(x)):
        negative, weight, positive, value, pooled = [], [], [], [], []
        for column in range(pool):
            if (query, column) not in masked:
                negative.append(scores[query, column] + margins[0])
                weight.append(float(candidates.pool_weight[column]))
        for n in range(len(candidates.pair_query)):
            label = candidates.pair_label[n]
            if candidates.pair_query[n] != query:
                continue
            if candidates.pair_positive[n]:
                positive.append(scores[query, label])
                value.append(float(candidates.pair_weight[n]))
                pooled.append(float(candidates.pool_weight[label]) if label < pool else 0.0)
            else:
                is_hard = bool(hard) and candidates.ids[label] in hard[query]
                negative.append(scores[query, label] + margins[is_hard])
                weight.append(float(candidates.pair_weight[n]))
        none = scores[query, :0]
        rows.append(
            Row(
                torch.stack(negative) if negative else none,
                torch.tensor(weight, dtype=x.dtype),
                torch.stack(positive) if positive else none,
                torch.tensor(value, dtype=x.dtype),
                torch.tensor(pooled, dtype=x.dtype),
            )
        )
    return rows


def bce(row: Row) -> torch.Tensor:
    return (row.value * softplus(-row.positive)).sum() + (row.weight * softplus(row.negative)).sum()


def softmax(row: Row) -> torch.Tensor:
    total = torch.cat([row.weight * row.negative.exp(), row.positive.exp()]).sum()
    return -(row.value * (row.positive.exp() / total).log()).sum()


def infonce(row: Row) -> torch.Tensor:
    loss = row.positive.sum() * 0
    for j in range(len(row.positive)):
        others = (row.weight * row.negative.exp()).sum()
        for k in range(len(row.positive)):
            if k != j:
                others = others + row.pooled[k] * row.positive[k].exp()
        loss = loss - row.value[j] * (row.positive[j].exp() / (row.positive[j].exp() + others)).log()
    return loss


def decoupled(row: Row) -> torch.Tensor:
    others = (row.weight * row.negative.exp()).sum()
    return -(row.value * (row.positive.exp() / (row.positive.exp() + others)).log()).sum()


def softtopk(row: Row, k: float = 5.0, alpha: float = 2.0) -> torch.Tensor:
    """The threshold by a root finder; its gradient by one step of Newton that changes nothing but the derivative."""
    scores = torch.cat([row.negative, row.positive])
    weight = torch.cat([row.weight, torch.ones_like(row.positive)])
    if weight.sum() <= k:
        return scores.sum() * 0

    def miss(t: float) -> float:
        return float((weight * torch.sigmoid(alpha * (scores.detach() + t))).sum() - k)

    t = brentq(miss, -1e4, 1e4, xtol=1e-13, rtol=1e-14)
    sigma = torch.sigmoid(alpha * (scores + t))
    slope = (alpha * weight * sigma * (1 - sigma)).sum().detach()
    if slope > 1e-12:
        t = t - ((weight * sigma).sum() - k) / slope
    return -(row.value * torch.sigmoid(alpha * (row.positive + t)).log()).sum()


def triplet(row: Row, margin: float = 0.3, least: float = -torch.inf) -> torch.Tensor:
    excess = (row.negative[:, None] - row.positive[None, :] + margin).clamp(min=0)
    excess = excess * (row.negative[:, None] >= least)
    return (row.weight[:, None] * row.value[None, :] * excess).sum()


REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "bce": bce,
    "softmax": softmax,
    "infonce": infonce,
    "decoupled": decoupled,
    "softtopk": softtopk,
    "triplet": triplet,
}


def reference(
    name: str,
    x: torch.Tensor,
    w: torch.Tensor,
    candidates: Candidates,
    temperature: float = 1.0,
    margins: Margins = NO_MARGINS,
    hard: Rows = (),
    **options: float,
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return (loss, its gradient on x [B, D], on w [C, D]) in float64."""
    x, w = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    loss = (x.sum() + w.sum()) * 0
    for row in rows_of(x, w, candidates, temperature, margins, hard):
        loss = loss + REFERENCES[name](row, **options)
    on_x, on_w = torch.autograd.grad(loss, [x, w])
    return loss.item(), on_x, on_w
