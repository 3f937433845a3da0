"""The labels with the most training points, for every query."""

from dataclasses import dataclass

import numpy as np

from schemas import PAD
from schemas.ragged import Ragged


@dataclass(frozen=True, eq=False)
class Popularity:
    """Ranking of the labels by `frequency` [L]."""

    frequency: np.ndarray

    def rank(self, texts: Ragged, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores [B, k], label ids [B, k] best first, -1 pads) for B texts."""
        order = np.argsort(-self.frequency, kind="stable")[:k]
        order = np.pad(order, (0, k - len(order)), constant_values=PAD)
        scores = np.where(order == PAD, -np.inf, self.frequency[order])
        return np.tile(scores, (texts.rows, 1)), np.tile(order, (texts.rows, 1))
