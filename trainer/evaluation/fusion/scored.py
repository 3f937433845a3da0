"""Scores of the labels on a shortlist, by each scorer."""

from dataclasses import dataclass

import numpy as np
import torch

from schemas import PAD
from schemas.ragged import Ragged
from trainer.device import CPU
from trainer.evaluation.memory.memory import Memory
from trainer.evaluation.memory.votes import best_votes, votes_of
from trainer.evaluation.search import LabelRows, Rows

VOTED = 100  # labels of a memory that come to the shortlist, at most
_BATCH = 256  # queries whose labels' rows are gathered together


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores of B queries with S labels each: `ids` [B, S] int64, -1 pads; the others [B, S], 0 where there is none."""

    ids: np.ndarray
    scores: np.ndarray
    texts: np.ndarray
    votes: np.ndarray


@dataclass(frozen=True, eq=False)
class Scorers:
    """Scorers beside the classifier: E(z) [n, D] of this rank's labels, and a memory of the training points."""

    texts: Rows | None = None
    memory: Memory | None = None

    def score(
        self,
        x: torch.Tensor,
        labels: LabelRows,
        shortlisted: tuple[np.ndarray, np.ndarray],
        filters: Ragged,
        among: np.ndarray | None = None,
    ) -> Scored:
        """Score the shortlist `shortlisted`, scores and ids [B, S], and the labels `among` all that the memory adds.

        All ranks have the same queries and get the same result; each has the scores of its own labels.
        """
        (scores, ids), group, first = shortlisted, labels.group, labels.first
        votes = None if self.memory is None else self.memory.votes(x)
        if votes is not None:
            _, voted = best_votes(votes, VOTED)
            listed = Ragged.from_matrix(ids).contains(voted) | filters.contains(voted)
            voted = np.where(listed if among is None else listed | ~np.isin(voted, among), PAD, voted)
            more = group.sum(torch.from_numpy(score_pairs(x, labels.rows, voted, first))).numpy()
            ids, scores = np.concatenate([ids, voted], 1), np.concatenate([scores, more], 1)
        texts = none = np.zeros(ids.shape, np.float32)
        if self.texts is not None:
            texts = group.sum(torch.from_numpy(score_pairs(x, self.texts, ids, first))).numpy()
        return Scored(ids, np.where(ids == PAD, 0, scores), texts, none if votes is None else votes_of(votes, ids))


def score_pairs(x: torch.Tensor, rows: Rows, ids: np.ndarray, first: int = 0) -> np.ndarray:
    """Multiply `rows` of labels `ids` [B, S] by x [B, D or more]: float32 [B, S], 0 outside [first, first + n)."""
    inside = torch.from_numpy((ids >= first) & (ids < first + len(rows)))
    places = torch.from_numpy(ids - first).masked_fill(~inside, 0)
    scores = torch.zeros(ids.shape)
    for low in range(0, len(ids) if inside.any() else 0, _BATCH):
        part = slice(low, low + _BATCH)
        asked = places[part].reshape(-1).to(getattr(rows, "device", CPU))
        gathered = rows[asked].to(x.device).float().unflatten(0, places[part].shape)
        scores[part] = torch.einsum("bsd,bd->bs", gathered, x[part, : gathered.shape[2]].float()).cpu()
    return (scores * inside).numpy()
