"""SoftmaxCE, InfoNCE and DecoupledSoftmax (DEXML, equations 3, 4 and 5): one loss with three denominators.

For a positive j with weight v, each loss is v (log D_j - s_j), where D_j = e^{s_j} + sum over the other counted labels.
The losses differ in the weight of the query's other positives in D_j: 1 (SoftmaxCE), the weight in the pool (InfoNCE),
or 0 (DecoupledSoftmax).
"""

from abc import abstractmethod

import torch

from trainer.losses.base import Loss, LossParts, Scores, finite


class Contrastive(Loss):
    """sum_P v log(D_j / e^{s_j}); sampled negatives are weighted in D_j, to estimate the sum over all labels."""

    @abstractmethod
    def positive_share(self, scores: Scores) -> torch.Tensor:
        """Return the weight [n] that each positive has in the denominators of the query's other positives."""

    def differentiate(self, scores: Scores) -> LossParts:
        positive, query = scores.positive, scores.query
        share = torch.where(positive, self.positive_share(scores), scores.weight)
        # Z = log(sum of all counted labels), j included with its share: D_j = e^Z + (1 - share_j) e^{s_j}.
        z = scores.logsumexp(scores.pair + share.log())
        gap = z[query] - scores.pair
        excess = _log_added(gap, 1 - share)  # log D_j - s_j, small if the positive is far above
        weight = torch.where(positive, scores.weight, 0)
        part = weight * (gap - excess).exp()  # v e^Z / D_j
        total = scores.sum_by_query(part)
        others = torch.where(positive, total[query] - part, total[query])
        inside = torch.where(share > 0, (share.log() - gap).exp(), 0)
        floor = finite(z)[:, None]
        return LossParts(
            weight @ torch.where(positive, excess, 0),
            weight * torch.expm1(-excess) + inside * others,
            lambda columns, s: scores.add_log_weight(columns, s).sub_(floor).exp_().mul_(total[:, None]),
        )


class SoftmaxCrossEntropy(Contrastive):
    """Equation 3: -sum_P v (s_j - log sum over every candidate of e^s). Positives have weight 1 in the denominator."""

    def positive_share(self, scores: Scores) -> torch.Tensor:
        return torch.ones_like(scores.pair)


class InfoNCE(Contrastive):
    """Equation 4: in the denominator, the query's other positives have the weight that they have in the pool.

    This equals equation 3 if the pool contains every label once, or is the union of the batch's positives and
    negatives.
    """

    def positive_share(self, scores: Scores) -> torch.Tensor:
        return scores.pool_weight_of_pairs()


class DecoupledSoftmax(Contrastive):
    """Equation 5: only negatives and the positive itself are in the denominator, so positives do not compete."""

    def positive_share(self, scores: Scores) -> torch.Tensor:
        return torch.zeros_like(scores.pair)


def _log_added(gap: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return log(e^gap + factor) for a factor in (-inf, 1], accurately even if e^gap is small.

    A negative factor subtracts the excess weight of a positive in Z; the excess is below e^gap by construction.
    """
    added = torch.logaddexp(gap, factor.clamp(min=0).log())
    subtracted = torch.log1p((factor.clamp(max=0) * (-gap.clamp(min=-80)).exp()).clamp(min=-1)) + gap
    return torch.where(factor < 0, subtracted, added)
