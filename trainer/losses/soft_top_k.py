"""SoftTop-k (DEXML, equations 6 and 7): positives should be among the k best labels, in any order."""

from typing import Literal

import torch
from pydantic import Field
from torch.nn.functional import logsigmoid

from trainer.device import CPU
from trainer.losses.base import Loss, LossParts, Scores, finite
from trainer.methods.kinds import LossSection

_PASSES = 60  # number of passes that bisection alone needs; with Newton's steps about 6 suffice
_PASSES_UNSEEN = 20
_FAR = 1e18  # a threshold below every score


class SoftTopKSection(LossSection):
    """Options of SoftTop-k."""

    kind: Literal["softtopk"] = "softtopk"
    k: float = Field(5.0, gt=0, description="number of labels among which the positives should rank")
    alpha: float = Field(2.0, gt=0, description="steepness of the sigmoid")


class SoftTopK(Loss):
    """-sum_P v log sigma(alpha (s_j + t)), with t such that sigma(alpha (s + t)) sums to k over all candidates.

    In the sum to k, a negative counts with its weight, and a positive counts once. The constant 1/L of equation 6 is
    left out: for a large L, 1/L would scale gradients below Adam's epsilon. The loss of a query with at most k
    candidates is 0.
    """

    section = SoftTopKSection
    options: SoftTopKSection

    def differentiate(self, scores: Scores) -> LossParts:
        alpha, query, positive = self.options.alpha, scores.query, scores.positive
        t = self.threshold(scores)
        weight = torch.where(positive, scores.weight, 0)
        share = torch.where(positive, 1, scores.weight).log()
        logits = alpha * (scores.pair + t[query])
        loss = -logsigmoid(logits)
        # dt/ds_l = -r_l / sum r with r = sigma' (equation 7), as a softmax over log r: no r underflows.
        log_slope = share + _log_derivative(logits)
        z = finite(
            scores.logsumexp(
                log_slope, lambda columns, s: _log_derivative(alpha * (s + t[:, None])) + scores.log_weight[columns]
            )
        )
        push = weight * -alpha * torch.sigmoid(-logits)
        pull = -scores.sum_by_query(push)

        def slopes(columns: slice, s: torch.Tensor) -> torch.Tensor:
            log_slope = _log_derivative(s.add_(t[:, None]).mul_(alpha)).add_(scores.log_weight[columns])
            return log_slope.sub_(z[:, None]).exp_().mul_(pull[:, None])

        return LossParts(weight @ loss, push + (log_slope - z[query]).exp() * pull[query], slopes)

    def threshold(self, scores: Scores) -> torch.Tensor:
        """Return t [B]; with at most k candidates, t is so large that every sigmoid is 1.

        The method bisects a bracket that contains t, or takes a Newton step on log(sum / k) if the step stays in the
        bracket.
        """
        k, share = self.options.k, torch.where(scores.positive, 1, scores.weight)
        count = scores.group.sum(
            scores.pool_weight.sum()
            - scores.masked_weight()
            + share.new_zeros(scores.queries).index_add_(0, scores.query, share)
        )
        greatest, least = self._score_range(scores)
        enough = count > k
        middle = torch.logit(torch.where(enough, k / count, 0.5)) / self.options.alpha
        # If all scores equalled the greatest (the least) score, t would be the lower (the upper) end of the bracket.
        low, high = middle - greatest, middle - least
        t = low
        tolerance = 64 * torch.finfo(t.dtype).eps * k
        on_host = t.device == CPU  # elsewhere a check would wait for the device
        for _ in range(_PASSES if on_host else _PASSES_UNSEEN):
            total, slope = self._sums(scores, share, t)
            miss = total - k
            if on_host and bool(((miss.abs() <= tolerance) | ~enough).all()):
                break
            low, high = torch.where(miss < 0, t, low), torch.where(miss > 0, t, high)
            newton = t - (total / k).log() * total / slope
            inside = (newton > low) & (newton < high)
            t = torch.where(inside, newton, (low + high) / 2)
        return torch.where(enough, t, _FAR)

    def _score_range(self, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest and the smallest score [B] of all candidates; 0 without candidates."""
        greatest = scores.pair.new_full((scores.queries,), -torch.inf)
        least = greatest.clone()  # greatest -s
        query = scores.query.long()
        greatest.scatter_reduce_(0, query, scores.pair, "amax")
        least.scatter_reduce_(0, query, -scores.pair, "amax")
        for _, s in scores.blocks():
            greatest = torch.maximum(greatest, s.amax(1))
            least = torch.maximum(least, (-s).masked_fill_(s == -torch.inf, -torch.inf).amax(1))
        return finite(scores.group.max(greatest)), -finite(scores.group.max(least))

    def _sums(self, scores: Scores, share: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum [B] of sigma(alpha (s + t)) over all candidates, and the derivative of this sum in t."""
        sigma = torch.sigmoid(self.options.alpha * (scores.pair + t[scores.query]))
        pairs = torch.stack([share * sigma, share * sigma * (1 - sigma)])
        sums = pairs.new_zeros(2, scores.queries).index_add_(1, scores.query, pairs)
        for columns, s in scores.blocks():
            sigma = (s + t[:, None]).mul_(self.options.alpha).sigmoid_()
            sums[0] += sigma @ scores.pool_weight[columns]
            sums[1] += sigma.addcmul_(sigma, sigma, value=-1) @ scores.pool_weight[columns]
        total, slope = scores.group.sum(sums)
        return total, self.options.alpha * slope


def _log_derivative(logits: torch.Tensor) -> torch.Tensor:
    """Return log(sigma (1 - sigma)), accurately even far from 0."""
    distance = logits.abs()
    return (-distance).sub_(torch.log1p(torch.exp(-distance)).mul_(2))
