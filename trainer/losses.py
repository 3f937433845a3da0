"""Losses over blocks of scores: softmax, decoupled softmax, InfoNCE, soft top-k, triplet."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from trainer.device import CPU, autocast, send
from trainer.group import ALONE, Group
from trainer.methods.kinds import LossSection, SoftTopKSection, TripletSection
from trainer.rows.torch_kernels import pair_scores, sparse_product
from trainer.stream.batch import Candidates

BLOCK = 1 << 14  # columns of a block in a pass over kept scores, which limits the other memory of the pass

BlockFunction = Callable[[slice, torch.Tensor], torch.Tensor]  # (columns, s [B, c]) -> [B, c]


class Scores:
    """Scores x.w of `candidates`, for x [B, D] and w [C, D] in float32 or float64; B counts the queries of all ranks.

    `pair` [n] contains the scores of pairs; `query`, `label`, `positive` (bool) and `weight`, all [n], describe the
    pairs. `blocks` yields the scores [B, R] of the pool; `log_weight` [R] is the logarithm of the pool's weights. The
    scores of negatives contain their margins. With
    `chunk`, at most [B, chunk] scores of the pool are in memory at a time, and every pass computes the products again.
    A rank of `group` scores the candidates among its own labels; `logsumexp` is over all ranks. `candidates` contains
    the original arrays, on the host.
    """

    def __init__(self, x: torch.Tensor, w: torch.Tensor, candidates: Candidates, chunk: int, group: Group) -> None:
        self.x, self.w, self.group, self.candidates = x, w, group, candidates
        self._weighted = bool((candidates.pool_weight != 1).any())
        order = np.argsort(candidates.masked_pool, kind="stable")
        self._masked_places = candidates.masked_pool[order]
        ordered = candidates._replace(
            ids=candidates.ids[:0], masked_query=candidates.masked_query[order], masked_pool=self._masked_places
        )
        sent = send(ordered, x.device)
        self.query, self.label, self.positive = sent.pair_query, sent.pair_label, sent.pair_positive
        self.weight = sent.pair_weight.to(x.dtype)
        self.pair = pair_scores(x, w, self.query, self.label)
        if len(candidates.pair_margin):
            self.pair = self.pair + sent.pair_margin
        self.pool_weight = sent.pool_weight.to(x.dtype)
        self.log_weight = self.pool_weight.log()
        self._masked_query, self._masked_pool = sent.masked_query, sent.masked_pool
        self._chunk = chunk
        self._kept = None if chunk and chunk < self.pool else self._score(0, self.pool)

    @property
    def queries(self) -> int:
        return len(self.x)

    @property
    def pool(self) -> int:
        """Return R, the number of labels that every query is scored against."""
        return len(self.pool_weight)

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (columns, s [B, c]) over the pool, with -inf for masked scores; read-only."""
        step = self._chunk if self._kept is None else BLOCK
        for start in range(0, self.pool, step):
            stop = min(start + step, self.pool)
            yield slice(start, stop), self._score(start, stop) if self._kept is None else self._kept[:, start:stop]

    def release_blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the blocks for the last time; callers may overwrite the blocks."""
        if self._kept is None:
            yield from self.blocks()
        elif self.pool:
            kept, self._kept = self._kept, None
            yield slice(0, self.pool), kept

    def add_log_weight(self, columns: slice, s: torch.Tensor) -> torch.Tensor:
        """Return s + log weight of a block [B, c]; s itself if every weight is 1."""
        return s + self.log_weight[columns] if self._weighted else s

    def sum_by_query(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the pairs' `values` [n] per query, over all ranks; return [B]."""
        return self.group.sum(values.new_zeros(self.queries).index_add_(0, self.query, values))

    def logsumexp(self, pair: torch.Tensor, transform: BlockFunction | None = None) -> torch.Tensor:
        """Return the log-sum-exp [B] of each query's `pair` values [n] and pool values, over all ranks.

        `transform` turns a block of the pool's scores into the values to sum; None means s + log weight. An empty sum
        gives -inf.
        """
        total = self._pair_logsumexp(pair)
        for columns, s in self.blocks():
            values = (transform or self.add_log_weight)(columns, s)
            total = torch.logaddexp(total, values.logsumexp(1))
        greatest = self.group.max(total.clone())
        return greatest + self.group.sum((total - finite(greatest)).exp()).log()

    def masked_weight(self) -> torch.Tensor:
        """Return the total weight [B] of the labels in this rank's pool that are masked for each query."""
        weight = self.pool_weight[self._masked_pool]
        return self.x.new_zeros(self.queries).index_add_(0, self._masked_query, weight)

    def pool_weight_of_pairs(self) -> torch.Tensor:
        """Return the weight [n] that each pair's label has in the pool; 0 for a label outside the pool."""
        if not self.pool:
            return torch.zeros_like(self.weight)
        return torch.where(self.label < self.pool, self.pool_weight[self.label.clamp(max=self.pool - 1)], 0)

    def _score(self, start: int, stop: int) -> torch.Tensor:
        low, high = np.searchsorted(self._masked_places, [start, stop]).tolist()
        query, columns = self._masked_query[low:high], self._masked_pool[low:high] - start
        return masked_scores(self.x, self.w[start:stop], query, columns, float(self.candidates.pool_margin))

    def _pair_logsumexp(self, pair: torch.Tensor) -> torch.Tensor:
        greatest = pair.new_full((self.queries,), -torch.inf).scatter_reduce_(0, self.query.long(), pair, "amax")
        part = (pair - finite(greatest)[self.query]).exp()
        return greatest + part.new_zeros(self.queries).index_add_(0, self.query, part).log()


def masked_scores(
    x: torch.Tensor, w: torch.Tensor, query: torch.Tensor, column: torch.Tensor, margin: float = 0.0
) -> torch.Tensor:
    """Return x.w + `margin` [B, R] for x [B, D] and w [R, D], with -inf at the positions (`query`, `column`) [m]."""
    scores = x @ w.T
    scores[query, column] = -torch.inf
    return scores.add_(margin) if margin else scores


def finite(values: torch.Tensor) -> torch.Tensor:
    """Return `values` with -inf replaced by 0, because subtracting -inf from scores of -inf would give NaN."""
    return values.masked_fill(values == -torch.inf, 0.0)


class LossParts(NamedTuple):
    """A loss and its slopes: this rank's part of the `value`, and its derivatives [n] in the scores of the pairs.

    `pool_slopes` turns a block of the pool's scores into slopes, possibly in place.
    """

    value: torch.Tensor
    pair_slopes: torch.Tensor
    pool_slopes: BlockFunction


class Loss(ABC):
    """A loss over candidates with positives, summed over the queries; scores are x.w / `temperature`.

    A loss is computed in float32 or a wider dtype, in the log domain, for embeddings of any dtype. With `chunk`, at
    most [B, chunk] scores exist at a time, and every pass computes the scores again; 0 keeps the scores of all labels
    of the rank.
    """

    def __init__(self, options: LossSection) -> None:
        self.options = options

    def __call__(self, x: torch.Tensor, w: torch.Tensor, candidates: Candidates, group: Group = ALONE) -> torch.Tensor:
        """Return this rank's part of the loss; the sum over ranks is the loss.

        x [B, D] are the queries of all ranks, and w [C, D] are the labels `candidates.ids` of this rank. The gradient
        on w is complete; gradients on x must be summed over ranks.
        """
        value: torch.Tensor = _LossFunction.apply(x, w, candidates, self, group)
        return value

    @abstractmethod
    def differentiate(self, scores: Scores) -> LossParts:
        """Return the loss and its slopes at `scores`; any number of passes over the scores is allowed."""


class _LossFunction(Function):
    """Both gradients are computed in the forward pass; slopes overwrite the scores in memory."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, w: torch.Tensor, candidates: Candidates, loss: Loss, group: Group
    ) -> torch.Tensor:
        temperature = loss.options.temperature
        wide = torch.promote_types(torch.promote_types(x.dtype, w.dtype), torch.float32)
        with autocast(x.device, None):
            scaled, vectors = x.to(wide) / temperature, w.to(wide)
            scores = Scores(scaled, vectors, candidates, loss.options.chunk, group)
            parts = loss.differentiate(scores)
            grad_x = sparse_product(scores.query, scores.label, parts.pair_slopes, len(x), vectors, ascending=True)
            grad_w = sparse_product(scores.label, scores.query, parts.pair_slopes, len(w), scaled)
            for columns, block in scores.release_blocks():
                slopes = parts.pool_slopes(columns, block)
                grad_x.addmm_(slopes, vectors[columns])
                grad_w[columns].addmm_(slopes.T, scaled)
            ctx.save_for_backward(grad_x.div_(temperature).to(x.dtype), grad_w.to(w.dtype))
            return parts.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad.to(grad_x.dtype), grad_w * grad.to(grad_w.dtype), None, None, None


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


_PASSES = 60  # number of passes that bisection alone needs; with Newton's steps about 6 suffice
_PASSES_UNSEEN = 20
_FAR = 1e18  # a threshold below every score


class SoftTopK(Loss):
    """-sum_P v log sigma(alpha (s_j + t)), with t such that sigma(alpha (s + t)) sums to k over all candidates.

    In the sum to k, a negative counts with its weight, and a positive counts once. The constant 1/L of equation 6 is
    left out: for a large L, 1/L would scale gradients below Adam's epsilon. The loss of a query with at most k
    candidates is 0.
    """

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


class Triplet(Loss):
    """sum_P sum_N v weight * max(0, s_n - s_j + margin), over negatives with s_n >= least.

    For unit vectors, a distance of at most r to the query means s_n >= 1 - r**2 / 2 (NGAME, algorithm 1, step 8).
    """

    options: TripletSection

    def differentiate(self, scores: Scores) -> LossParts:
        margin, radius = self.options.margin, self.options.radius
        least = 1 - radius**2 / 2 if radius else -math.inf
        is_positive = scores.candidates.pair_positive
        positive, negative = send((np.flatnonzero(is_positive), np.flatnonzero(~is_positive)), scores.pair.device)
        positives = _SortedPositives(scores, positive, margin, least)
        query, s, weight = scores.query[negative].long(), scores.pair[negative], scores.weight[negative]
        below = torch.where(s >= least, positives.count_below(query, s + margin), 0)
        value = positives.loss(query, s, below) @ weight
        by_rank = torch.zeros_like(positives.weight).view(-1)
        by_rank.index_add_(0, query * positives.weight.shape[1] + below, weight)
        by_rank = by_rank.view_as(positives.weight)
        rows = torch.arange(scores.queries, device=s.device)[:, None]
        for columns, block in scores.blocks():
            counts = positives.count_reached(block)
            value = value + (positives.loss(rows, block, counts) @ scores.pool_weight[columns]).sum()
            by_rank.scatter_add_(1, counts, scores.pool_weight[columns].repeat(len(counts), 1))
        # A negative that reaches i positives reaches the i lowest positives, so sums for a positive run from the end.
        reaching = scores.group.sum(by_rank).flip(1).cumsum(1).flip(1)
        query_of_positive = scores.query[positive].long()
        rank = positives.count_below(query_of_positive, scores.pair[positive])
        slopes = torch.empty_like(scores.pair)
        slopes[negative] = positives.weight[query, below] * weight
        slopes[positive] = -scores.weight[positive] * reaching[query_of_positive, rank + 1]
        return LossParts(
            value,
            slopes,
            lambda columns, s: positives.weight.gather(1, positives.count_reached(s)).mul_(scores.pool_weight[columns]),
        )


class _SortedPositives:
    """The positives of each query, over all ranks, in ascending order of their scores.

    A negative reaches the positives that score less than the margin above it, and its loss depends on the number of
    these positives. Column i of `weight` [B, P + 1] is the sum of the weights v of the i lowest positives; column i of
    `moment` [B, P + 1] is the sum of v s.
    """

    def __init__(self, scores: Scores, positive: torch.Tensor, margin: float, least: float) -> None:
        self._margin, self._least = margin, least
        query, s, v = scores.query[positive].long(), scores.pair[positive], scores.weight[positive]
        # The host has the same numbers, so these lines do not wait for the device.
        query_of = scores.candidates.pair_query[scores.candidates.pair_positive]
        counts = np.bincount(query_of, minlength=scores.queries)
        width = max(1, int(scores.group.max(torch.tensor(counts.max(initial=0)))))
        slot = send(np.arange(len(query_of)) - (counts.cumsum() - counts)[query_of], s.device)

        def padded(values: torch.Tensor, pad: float) -> torch.Tensor:
            """Return the ragged `values` of all ranks as a padded matrix [B, ranks x width]."""
            rows = values.new_full((scores.queries, width), pad)
            rows[query, slot] = values
            ranks = scores.group.all_gather(rows)
            return ranks.view(-1, scores.queries, width).transpose(0, 1).reshape(scores.queries, -1)

        self._score, order = padded(s, torch.inf).sort(1)
        weight = padded(v, 0).gather(1, order)
        moment = torch.where(weight > 0, weight * self._score, 0)
        self.weight = torch.nn.functional.pad(weight.cumsum(1), (1, 0))
        self.moment = torch.nn.functional.pad(moment.cumsum(1), (1, 0))

    def count_reached(self, s: torch.Tensor) -> torch.Tensor:
        """Count the positives that score below s + margin, for negatives s [B, c]; 0 if s is below `least`."""
        return torch.where(s >= self._least, torch.searchsorted(self._score, s + self._margin), 0)

    def count_below(self, query: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """Count the positives of `query` [n] that score below s [n]."""
        return torch.searchsorted(self._score[query], s[:, None])[:, 0]

    def loss(self, rows: torch.Tensor, s: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Sum v (s - s_j + margin) over the `counts` lowest positives j of `rows`; 0 if masked."""
        part = self.weight[rows, counts] * (s + self._margin) - self.moment[rows, counts]
        return torch.where(counts > 0, part, 0)
