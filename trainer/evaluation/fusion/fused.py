"""A shortlist by the classifier, ranked again with the scores of the labels' texts (NGAME, appendix C)."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from schemas.tables import PAD
from trainer.evaluation.fusion.tree import Fusion
from trainer.group import ALONE, Group

_AT_ONCE = 256  # queries whose labels' rows are gathered together


class Rows(Protocol):
    """[n, D] that rows are taken from, by ids int64 [m]: a tensor, or what is mapped from files."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(frozen=True, eq=False)
class Fused:
    """`texts`: E(z) [n, D] of this rank's labels, from label `first` on; `frequency` [L] training points of all."""

    tree: Fusion
    texts: Rows
    frequency: np.ndarray
    shortlist: int
    first: int = 0
    group: Group = ALONE

    def rank(self, x: torch.Tensor, scores: np.ndarray, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores float32 [B, k], ids int64 [B, k]) of the best fused scores, best first; -inf and -1 pad.

        `scores`, `ids` [B, S]: the classifier's shortlist for x [B, D or more]; equal scores stay in its order.
        """
        there = ids != PAD
        # Each rank has the scores of its own labels.
        of_texts = self.group.sum(torch.from_numpy(score_pairs(x, self.texts, ids, self.first))).numpy()
        fused = np.where(there, self.tree(of_texts, np.where(there, scores, 0), self.frequency[ids]), -np.inf)
        order = np.argsort(-fused, axis=1, kind="stable")[:, :k]
        missing = ((0, 0), (0, k - order.shape[1]))
        best = np.pad(np.take_along_axis(fused, order, 1), missing, constant_values=-np.inf)
        return best.astype(np.float32), np.pad(np.take_along_axis(ids, order, 1), missing, constant_values=PAD)


def score_pairs(x: torch.Tensor, rows: Rows, ids: np.ndarray, first: int = 0) -> np.ndarray:
    """`rows` of labels `ids` [B, S] times x [B, D or more], float32 [B, S]; 0 for labels not in [first, first + n)."""
    own = torch.from_numpy((ids >= first) & (ids < first + len(rows)))
    places = torch.from_numpy(ids - first).masked_fill(~own, 0)
    found = torch.zeros(ids.shape)
    for low in range(0, len(ids) if own.any() else 0, _AT_ONCE):
        part = slice(low, low + _AT_ONCE)
        some = rows[places[part].reshape(-1)].float().unflatten(0, places[part].shape)
        found[part] = torch.einsum("bsd,bd->bs", some, x[part, : some.shape[2]].float()).cpu()
    return (found * own).numpy()
