"""Focal loss (Lin et al., 2017): binary cross-entropy in which correct scores count less."""

import torch
from torch.nn.functional import softplus

from schemas.options import key
from trainer.losses import Loss, LossParts, Scores
from trainer.methods.kinds import LossSection


class FocalSection(LossSection):
    kind: str
    gamma: float = key(2.0, "how much less correct scores count; 0: binary cross-entropy", ge=0)


class Focal(Loss):
    """sum weight p^gamma softplus(z), z = s for a negative and -s for a positive, p = sigma(z)."""

    section = FocalSection
    options: FocalSection

    def differentiate(self, scores: Scores) -> LossParts:
        sign = 1 - 2 * scores.positive.to(scores.pair.dtype)
        loss, slopes = self.focal(sign * scores.pair)
        value = loss @ scores.weight
        for columns, s in scores.blocks():
            value = value + self.focal(s)[0].sum(0) @ scores.pool_weight[columns]
        slopes = sign * slopes * scores.weight
        return LossParts(value, slopes, lambda columns, s: self.focal(s)[1] * scores.pool_weight[columns])

    def focal(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p, cross_entropy = torch.sigmoid(z), softplus(z)
        gamma, factor = self.options.gamma, p**self.options.gamma
        return factor * cross_entropy, factor * (gamma * (1 - p) * cross_entropy + p)
