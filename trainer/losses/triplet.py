"""Triplet loss with a margin, over every pair of a positive and a negative (NGAME, section 3)."""

import math
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from trainer.losses.base import Loss, LossParts, Scores
from trainer.methods.kinds import LossSection
from trainer.stream.transfer import send


class TripletSection(LossSection):
    """Options of the triplet loss."""

    kind: Literal["triplet"] = "triplet"
    margin: float = Field(0.3, ge=0, description="margin by which a positive must score above every negative")
    radius: float = Field(
        0.0,
        ge=0,
        le=2,
        description="for unit vectors: ignore negatives farther than this from the query; 0: use all negatives",
    )

    def check_vectors(self, unit: bool) -> None:
        if self.radius and not (unit and self.temperature == 1):
            raise ValueError(
                f"loss.radius = {self.radius:g} is a distance between unit vectors, which needs loss.temperature = "
                "1, encoder.normalize = true, encoder.scale = 1, and encoded labels or classifier.normalize = true"
            )


class Triplet(Loss):
    """sum_P sum_N v weight * max(0, s_n - s_j + margin), over negatives with s_n >= least.

    For unit vectors, a distance of at most r to the query means s_n >= 1 - r**2 / 2 (NGAME, algorithm 1, step 8).
    """

    section = TripletSection
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
