"""ASTRA with a second loss that spreads queries over the sphere: uniformity of Wang and Isola (2020)."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize, pdist

from schemas.layout import RunLayout
from schemas.options import Options, key
from trainer.methods.astra import Astra
from trainer.second_loss import SecondLoss
from trainer.stream import Batch


class SpreadSection(Options):
    weight: float = key(0.1, "weight of the loss; 0: none", ge=0)


class Spread(Astra):
    spread: SpreadSection = SpreadSection()

    def second_loss(self, run: RunLayout) -> Uniformity | None:
        return Uniformity(self.spread.weight) if self.spread.weight else None


class Uniformity(SecondLoss):
    """log mean exp(-2 ||x_i - x_j||^2) over the pairs of a rank's queries, with a rank's share of the weight."""

    def __init__(self, weight: float) -> None:
        self._weight = weight

    def learn(self, batch: Batch, x: torch.Tensor, queries: int) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        if len(batch) < 2:
            return 0.0, 0.0
        x = x.detach().requires_grad_()
        loss = pdist(normalize(x)).square().mul(-2).exp().mean().log() * (self._weight * len(batch) / queries)
        return loss.detach(), torch.autograd.grad(loss, x)[0]
