"""Base of all losses over candidates: scores of a batch, and gradients that are computed from the loss's slopes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trainer.device import autocast
from trainer.group import ALONE, Group
from trainer.methods.kinds import LossSection
from trainer.rows.torch_kernels import pair_scores, sparse_product
from trainer.stream.batch import Candidates
from trainer.stream.transfer import send

BLOCK = 1 << 14  # columns of a block in a pass over kept scores, which limits the other memory of the pass

BlockFunction = Callable[[slice, torch.Tensor], torch.Tensor]  # (columns, s [B, c]) -> [B, c]


class Scores:
    """Scores x.w of `candidates`, for x [B, D] and w [C, D] in float32 or float64; B counts the queries of all ranks.

    `pair` [n] contains the scores of pairs; `query`, `label`, `positive` (bool) and `weight`, all [n], describe the
    pairs. `blocks` yields the scores [B, R] of the pool; `log_weight` [R] is the logarithm of the pool's weights. With
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
        return masked_scores(self.x, self.w[start:stop], query, columns)

    def _pair_logsumexp(self, pair: torch.Tensor) -> torch.Tensor:
        greatest = pair.new_full((self.queries,), -torch.inf).scatter_reduce_(0, self.query.long(), pair, "amax")
        part = (pair - finite(greatest)[self.query]).exp()
        return greatest + part.new_zeros(self.queries).index_add_(0, self.query, part).log()


def masked_scores(x: torch.Tensor, w: torch.Tensor, query: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return x.w [B, R] for x [B, D] and w [R, D], with -inf at the positions (`query`, `column`) [m]."""
    scores = x @ w.T
    scores[query, column] = -torch.inf
    return scores


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

    section: ClassVar[type[LossSection]] = LossSection  # options of this kind of loss

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
