"""Ranking of a classifier's shortlist by fused scores (NGAME, appendix C)."""

from dataclasses import dataclass

import numpy as np
import torch

from schemas.tables import PAD
from trainer.evaluation.fusion.tree import Fusion
from trainer.evaluation.search import Rows
from trainer.group import ALONE, Group

_BATCH = 256  # queries whose labels' rows are gathered together


@dataclass(frozen=True, eq=False)
class Fused:
    """Fused scores of a shortlist.

    `texts`: E(z) [n, D] of this rank's labels, from label `first` on; `frequency` [L] training points of all labels.
    """

    tree: Fusion
    texts: Rows
    frequency: np.ndarray
    shortlist: int
    first: int = 0
    group: Group = ALONE

    def rank(self, x: torch.Tensor, scores: np.ndarray, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores float32 [B, k], ids int64 [B, k]) of the best fused scores, best first; -inf and -1 pad.

        `scores`, `ids` [B, S]: the classifier's shortlist for x [B, D or more]; equal scores stay in its order.
        """
        listed = ids != PAD
        # Each rank has the scores of its own labels.
        text_scores = self.group.sum(torch.from_numpy(score_pairs(x, self.texts, ids, self.first))).numpy()
        fused = np.where(listed, self.tree(text_scores, np.where(listed, scores, 0), self.frequency[ids]), -np.inf)
        order = np.argsort(-fused, axis=1, kind="stable")[:, :k]
        missing = ((0, 0), (0, k - order.shape[1]))
        best = np.pad(np.take_along_axis(fused, order, 1), missing, constant_values=-np.inf)
        return best.astype(np.float32), np.pad(np.take_along_axis(ids, order, 1), missing, constant_values=PAD)


def score_pairs(x: torch.Tensor, rows: Rows, ids: np.ndarray, first: int = 0) -> np.ndarray:
    """Multiply `rows` of labels `ids` [B, S] by x [B, D or more]: float32 [B, S], 0 outside [first, first + n)."""
    inside = torch.from_numpy((ids >= first) & (ids < first + len(rows)))
    places = torch.from_numpy(ids - first).masked_fill(~inside, 0)
    scores = torch.zeros(ids.shape)
    for low in range(0, len(ids) if inside.any() else 0, _BATCH):
        part = slice(low, low + _BATCH)
        gathered = rows[places[part].reshape(-1)].float().unflatten(0, places[part].shape)
        scores[part] = torch.einsum("bsd,bd->bs", gathered, x[part, : gathered.shape[2]].float()).cpu()
    return (scores * inside).numpy()
