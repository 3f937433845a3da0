"""Triplet loss with a margin, of every positive against every negative (NGAME, section 3)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import Field

from trainer.config.loss import LossSection
from trainer.losses.base import Loss, Weighed
from trainer.losses.candidate_scores import Scores


class TripletSection(LossSection):
    """Options of triplets with a margin."""

    kind: Literal["triplet"] = "triplet"
    margin: float = Field(0.3, ge=0, description="how far a positive is to be above every negative")
    radius: float = Field(
        0.0,
        ge=0,
        le=2,
        description="over unit vectors: negatives farther than this from the query count nothing; 0: all do",
    )

    def check_vectors(self, unit: bool) -> None:
        if self.radius and not (unit and self.temperature == 1):
            raise ValueError(
                f"loss.radius = {self.radius:g} is a distance of unit vectors: it needs loss.temperature = 1, "
                "head.kind = 'label-encoder', encoder.normalize = true and encoder.scale = 1"
            )


@dataclass(frozen=True)
class Triplet(Loss):
    """sum_P sum_N v weight * max(0, s_n - s_j + margin), over the negatives with s_n >= least.

    Of unit vectors, those within r of the query have s_n >= 1 - r**2 / 2 (NGAME, algorithm 1, step 8).
    """

    section = TripletSection

    margin: float = 0.3
    least: float = -math.inf

    @classmethod
    def of(cls, config: Any) -> "Triplet":
        least = 1 - config.radius**2 / 2 if config.radius else -math.inf
        return cls(config.temperature, config.chunk, config.margin, least)

    def weigh(self, scores: Scores) -> Weighed:
        ladder = _Ladder(scores, self.margin, self.least)
        negative = ~scores.positive
        query, s, weight = scores.query[negative].long(), scores.pair[negative], scores.weight[negative]
        steps = torch.where(s >= self.least, ladder.steps_of(query, s + self.margin), 0)
        value = ladder.loss(query, s, steps) @ weight
        reached = torch.zeros_like(ladder.weight).view(-1)
        reached.index_add_(0, query * ladder.weight.shape[1] + steps, weight)
        reached = reached.view_as(ladder.weight)
        rows = torch.arange(scores.queries, device=s.device)[:, None]
        for columns, block in scores.blocks():
            found = ladder.steps(block)
            value = value + (ladder.loss(rows, block, found) @ scores.pool_weight[columns]).sum()
            reached.scatter_add_(1, found, scores.pool_weight[columns].repeat(len(found), 1))
        # A negative at step i is within the margin of the i lowest positives: a positive's are summed from behind.
        beyond = scores.sum(reached).flip(1).cumsum(1).flip(1)
        own = scores.query[scores.positive].long()
        place = ladder.steps_of(own, scores.pair[scores.positive])
        slopes = torch.empty_like(scores.pair)
        slopes[negative] = ladder.weight[query, steps] * weight
        slopes[scores.positive] = -scores.weight[scores.positive] * beyond[own, place + 1]
        return Weighed(
            value,
            slopes,
            lambda columns, s: ladder.weight.gather(1, ladder.steps(s)).mul_(scores.pool_weight[columns]),
        )


class _Ladder:
    """The positives of each query, of all ranks, in ascending order: a negative's loss is a matter of where it stands.

    `weight` [B, P + 1]: the sum of the weights v of the i lowest positives; `moment` the same of v s.
    """

    def __init__(self, scores: Scores, margin: float, least: float) -> None:
        self._margin, self._least = margin, least
        positive = scores.positive
        query, s, v = scores.query[positive].long(), scores.pair[positive], scores.weight[positive]
        counts = torch.bincount(query, minlength=scores.queries)
        width = max(1, int(scores.max(counts.max())))
        slot = torch.arange(len(query), device=s.device) - (counts.cumsum(0) - counts)[query]
        self._score = self._padded(scores, query, slot, s, width, torch.inf)
        weight = self._padded(scores, query, slot, v, width, 0)
        self._score, order = self._score.sort(1)
        weight = weight.gather(1, order)
        moment = torch.where(weight > 0, weight * self._score, 0)
        self.weight = torch.nn.functional.pad(weight.cumsum(1), (1, 0))
        self.moment = torch.nn.functional.pad(moment.cumsum(1), (1, 0))

    def steps(self, s: torch.Tensor) -> torch.Tensor:
        """How many positives are below s + margin, for s [B, c]; none where s is below `least`."""
        return torch.where(s >= self._least, torch.searchsorted(self._score, s + self._margin), 0)

    def steps_of(self, query: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        """How many positives of `query` [n] are below s [n]."""
        return torch.searchsorted(self._score[query], s[:, None])[:, 0]

    def loss(self, rows: torch.Tensor, s: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """The sum of v (s - s_j + margin) over the `steps` lowest positives j of `rows`; 0 where struck."""
        part = self.weight[rows, steps] * (s + self._margin) - self.moment[rows, steps]
        return torch.where(steps > 0, part, 0)

    @staticmethod
    def _padded(
        scores: Scores, query: torch.Tensor, slot: torch.Tensor, values: torch.Tensor, width: int, pad: float
    ) -> torch.Tensor:
        """Ragged `values` as [B, ranks x width], of all ranks."""
        rows = values.new_full((scores.queries, width), pad)
        rows[query, slot] = values
        ranks = scores.gather(rows)
        return ranks.view(-1, scores.queries, width).transpose(0, 1).reshape(scores.queries, -1)
