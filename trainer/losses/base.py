"""Base of all losses over candidates: a value, and slopes with respect to the scores, which become gradients here."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trainer.device import autocast
from trainer.group import ALONE, Group
from trainer.losses.candidate_scores import BlockFunction, Scores
from trainer.methods.kinds import LossSection
from trainer.rows.sparse_products import sparse_product
from trainer.stream.batch import Candidates


class LossParts(NamedTuple):
    """A loss and its slopes: this rank's part of the `value`, and the slopes of the pairs' scores [n].

    `pool_slopes` turns a block of the pool's scores into slopes, which may take their place.
    """

    value: torch.Tensor
    pair_slopes: torch.Tensor
    pool_slopes: BlockFunction


class Loss(ABC):
    """A loss over any candidates with positives, summed over the queries; scores are x.w / `temperature`.

    It is computed in float32 at least, in logarithms, for embeddings of any dtype. With `chunk`, scores of no more than
    [B, chunk] exist at a time and are computed again in every pass; 0 keeps those of all labels of the rank.
    """

    section: ClassVar[type[LossSection]] = LossSection  # options of this kind

    def __init__(self, options: LossSection) -> None:
        self.options = options

    def __call__(self, x: torch.Tensor, w: torch.Tensor, candidates: Candidates, group: Group = ALONE) -> torch.Tensor:
        """Return this rank's part of the loss; the sum over ranks is the loss.

        x [B, D] are the queries of all ranks, w [C, D] the labels `candidates.ids` of this rank alone. The gradient on
        w is complete; those on x are to be summed over ranks.
        """
        value: torch.Tensor = _LossFunction.apply(x, w, candidates, self, group)
        return value

    @abstractmethod
    def differentiate(self, scores: Scores) -> LossParts:
        """Return the loss at `scores` and its slopes, in the passes over them that it needs."""


class _LossFunction(Function):
    """Both gradients in the forward pass, where the slopes take the place of the scores in memory."""

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
