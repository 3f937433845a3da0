"""One-vs-all binary cross-entropy over a pool of any size (DEXML, equation 2)."""

from dataclasses import dataclass

import torch
from torch.nn.functional import softplus

from trainer.losses.base import Loss, Weighed
from trainer.losses.scores import Scores


@dataclass(frozen=True)
class OneVsAll(Loss):
    """sum_P softplus(-s) + sum_N weight * softplus(s): every score for itself, so ranks need no exchange."""

    def weigh(self, scores: Scores) -> Weighed:
        margin = torch.where(scores.positive, -scores.pair, scores.pair)
        slopes = torch.sigmoid(margin) * scores.weight
        value = softplus(margin) @ scores.weight
        for columns, s in scores.blocks():
            value = value + softplus(s).sum(0) @ scores.pool_weight[columns]
        return Weighed(
            value,
            torch.where(scores.positive, -slopes, slopes),
            lambda columns, s: s.sigmoid_().mul_(scores.pool_weight[columns]),
        )
