"""What every loss over candidates is: a value, and slopes with respect to the scores, which become gradients here."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trainer.config.loss import LossSection
from trainer.group import ALONE, Group
from trainer.losses.candidate_scores import Reading, Scores
from trainer.rows.sparse_products import sparse_product
from trainer.stream.batch import Candidates


class Weighed(NamedTuple):
    """A loss at given scores: this rank's part of its `value`, the slopes of its `pair` scores [n], and how a block of
    the pool's scores becomes slopes (which may take their place)."""

    value: torch.Tensor
    pair: torch.Tensor
    pool: Reading


@dataclass(frozen=True)
class Loss(ABC):
    """A loss over any candidates with positives, summed over the queries; scores are x.w / `temperature`.

    Within, everything is in float32 at least, in logarithms, whatever the embeddings are in. With `chunk`, scores of no
    more than [B, chunk] exist at a time and are computed again in every pass; 0 keeps those of all labels of the rank.
    """

    section: ClassVar[type[LossSection]] = LossSection  # options of this kind

    temperature: float = 1.0
    chunk: int = 0

    @classmethod
    def of(cls, config: Any) -> "Loss":
        """Build the loss that `config`, of type `section`, describes: its fields are those of the section."""
        return cls(**config.model_dump(exclude={"kind"}))

    def __call__(self, x: torch.Tensor, w: torch.Tensor, candidates: Candidates, group: Group = ALONE) -> torch.Tensor:
        """x [B, D] of the queries of all ranks, w [C, D] of the labels `candidates.ids` of this rank alone.

        Returns the part of the loss that this rank's positives (and its negatives, where the loss has a term for them)
        make: the sum over ranks is the loss. Its gradient on w is whole; those on x are to be summed over ranks.
        """
        value: torch.Tensor = _Weighing.apply(x, w, candidates, self, group)
        return value

    @abstractmethod
    def weigh(self, scores: Scores) -> Weighed:
        """The loss at `scores`, in the passes over them that it needs."""


class _Weighing(Function):
    """Both gradients in the forward pass, where the slopes take the place of the scores in memory."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, w: torch.Tensor, candidates: Candidates, loss: Loss, group: Group
    ) -> torch.Tensor:
        wide = torch.promote_types(torch.promote_types(x.dtype, w.dtype), torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            scaled, vectors = x.to(wide) / loss.temperature, w.to(wide)
            scores = Scores(scaled, vectors, candidates, loss.chunk, group)
            weighed = loss.weigh(scores)
            grad_x = sparse_product(scores.query, scores.label, weighed.pair, len(x), vectors, ascending=True)
            grad_w = sparse_product(scores.label, scores.query, weighed.pair, len(w), scaled)
            for columns, block in scores.spent():
                slopes = weighed.pool(columns, block)
                grad_x.addmm_(slopes, vectors[columns])
                grad_w[columns].addmm_(slopes.T, scaled)
            ctx.save_for_backward(grad_x.div_(loss.temperature).to(x.dtype), grad_w.to(w.dtype))
            return weighed.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad.to(grad_x.dtype), grad_w * grad.to(grad_w.dtype), None, None, None
