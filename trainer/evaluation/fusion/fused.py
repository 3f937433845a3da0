"""Ranking of a shortlist by fused scores (NGAME, appendix C, and a memory of the training points)."""

from dataclasses import dataclass

import numpy as np
import torch

from schemas import PAD
from schemas.ragged import Ragged
from trainer.evaluation.fusion.scored import Scorers
from trainer.evaluation.fusion.tree import Fusion
from trainer.evaluation.fusion.weights import Weights
from trainer.evaluation.search import LabelRows


@dataclass(frozen=True, eq=False)
class Fused:
    """Fused scores of a `shortlist`; `frequency` [L]: training points of all labels."""

    fusion: Fusion | Weights
    scorers: Scorers
    frequency: np.ndarray
    shortlist: int

    def rank(
        self,
        x: torch.Tensor,
        labels: LabelRows,
        shortlisted: tuple[np.ndarray, np.ndarray],
        k: int,
        filters: Ragged,
        among: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores float32 [B, k], ids int64 [B, k]) of the best fused scores, best first; -inf and -1 pad.

        `shortlisted`: scores and ids [B, S] for x [B, D or more] of `labels`; equal scores stay in their order. `among`
        [C]: the candidates, which the memory adds no others to; without, all labels.
        """
        scored = self.scorers.score(x, labels, shortlisted, filters, among)
        fused = np.where(scored.ids == PAD, -np.inf, self.fusion.fuse(scored, self.frequency[scored.ids]))
        order = np.argsort(-fused, axis=1, kind="stable")[:, :k]
        missing = ((0, 0), (0, k - order.shape[1]))
        best = np.pad(np.take_along_axis(fused, order, 1), missing, constant_values=-np.inf)
        return best.astype(np.float32), np.pad(np.take_along_axis(scored.ids, order, 1), missing, constant_values=PAD)
