"""Fused scores of a shortlist: of a classifier, labels' texts, a memory and a linear ranker, by weights or a tree."""

import json
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import torch

from schemas import PAD
from schemas.errors import TableError
from schemas.ragged import Ragged
from trainer.device import CPU
from trainer.evaluation.memory import Memory, best_votes, votes_of
from trainer.evaluation.search import LabelRows, Rows
from trainer.inputs import Inputs
from trainer.linear.ranker import LinearRanker

VOTED = 100  # labels of a memory, and as many of a linear ranker, that come to the shortlist, at most
_BATCH = 256  # queries whose labels' rows are gathered together


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores of B queries with S labels each: `ids` [B, S] int64, -1 pads; the others [B, S], 0 where there is none."""

    ids: np.ndarray
    scores: np.ndarray
    texts: np.ndarray
    votes: np.ndarray
    linear: np.ndarray


class Fusion(Protocol):
    """A way to fuse scores, weights or a tree; `reads_texts`: those of labels' texts count."""

    @property
    def reads_texts(self) -> bool: ...

    def fuse(self, scored: Scored, frequency: np.ndarray) -> np.ndarray:
        """Return the fused scores [B, S] of labels with `frequency` [B, S]."""

    def to_json(self) -> bytes:
        """Return what was fitted as a file."""


@dataclass(frozen=True, eq=False)
class Scorers:
    """Scorers beside the classifier: E(z) [n, D] of this rank's labels, a memory, and a linear ranker."""

    texts: Rows | None = None
    memory: Memory | None = None
    linear: LinearRanker | None = None

    def score(
        self,
        x: torch.Tensor,
        inputs: Inputs | None,
        labels: LabelRows,
        shortlisted: tuple[np.ndarray, np.ndarray],
        filters: Ragged,
        among: np.ndarray | None = None,
    ) -> Scored:
        """Score the shortlist `shortlisted`, scores and ids [B, S], and the labels `among` all that others add to it.

        `inputs`: what x was embedded from. All ranks have the same queries and get the same result; each has the scores
        of its own labels.
        """
        (scores, ids), group, first = shortlisted, labels.group, labels.first
        votes = None if self.memory is None else self.memory.votes(x)
        ranked = None if self.linear is None or inputs is None else self.linear.votes(inputs, VOTED)
        for found in (votes, ranked):
            if found is None:
                continue
            _, more = best_votes(found, VOTED)
            listed = Ragged.from_matrix(ids).contains(more) | filters.contains(more)
            more = np.where(listed if among is None else listed | ~np.isin(more, among), PAD, more)
            pairs = group.sum(torch.from_numpy(score_pairs(x, labels.rows, more, first))).numpy()
            ids, scores = np.concatenate([ids, more], 1), np.concatenate([scores, pairs], 1)
        texts = none = np.zeros(ids.shape, np.float32)
        if self.texts is not None:
            texts = group.sum(torch.from_numpy(score_pairs(x, self.texts, ids, first))).numpy()
        beside = (none if found is None else votes_of(found, ids) for found in (votes, ranked))
        return Scored(ids, np.where(ids == PAD, 0, scores), texts, *beside)


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


FORMAT = 1
K = 5  # of the nDCG that weights are chosen by
_STEPS = (0.0, *(2.0**power for power in range(-6, 3)))
_ROUNDS = 2


@dataclass(frozen=True)
class Weights:
    """s + `texts` t + `votes` v + `linear` l. `logistic`: s is a probability; else the score over `unit`."""

    texts: float = 0.0
    votes: float = 0.0
    unit: float = 1.0
    logistic: bool = False
    linear: float = 0.0

    @classmethod
    def fit(cls, scored: Scored, relevant: Ragged, logistic: bool) -> "Weights":
        """Find the weights with the best nDCG of validation queries; `relevant`: their labels."""
        unit = 1.0 if logistic else float(np.std(scored.scores[scored.ids != PAD])) or 1.0
        weights = cls(unit=unit, logistic=logistic)
        hits = relevant.contains(scored.ids)
        ideal = _ideal(relevant.counts)
        best = _ndcg(weights, scored, hits, ideal)
        for _ in range(_ROUNDS):
            for name in ("votes", "linear", "texts"):
                for value in _STEPS:
                    changed = weights.changed(name, value)
                    gain = _ndcg(changed, scored, hits, ideal)
                    if gain > best:
                        weights, best = changed, gain
        return weights

    @property
    def reads_texts(self) -> bool:
        """True where labels' texts count."""
        return self.texts > 0

    def changed(self, name: str, value: float) -> "Weights":
        """Return the same weights but one."""
        return Weights(**{**asdict(self), name: value})

    def fuse(self, scored: Scored, frequency: np.ndarray | None = None) -> np.ndarray:
        """Return the fused scores [B, S]; frequencies do not count."""
        scores = scored.scores.astype(np.float64)
        scores = 1 / (1 + np.exp(-scores)) if self.logistic else scores / self.unit
        return scores + self.texts * scored.texts + self.votes * scored.votes + self.linear * scored.linear

    def to_json(self) -> bytes:
        """Return the weights as a file."""
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    @classmethod
    def parse(cls, data: bytes, place: str) -> "Weights":
        """Read the weights in the content of a file, which lies at `place`. Raises TableError for another file."""
        try:
            body = json.loads(data)
            if body.pop("format") != FORMAT:
                raise ValueError("of another format")
            weights = cls(**body)
            numbers = np.array([weights.unit, weights.texts, weights.votes, weights.linear], float)
            if not np.isfinite(numbers).all() or numbers[0] <= 0:
                raise ValueError(f"weights {numbers.tolist()}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TableError(f"{place}: not the weights of score fusion: {error}. Fit them again.") from None
        return weights


def _ndcg(weights: Weights, scored: Scored, hits: np.ndarray, ideal: np.ndarray) -> float:
    fused = np.where(scored.ids == PAD, -np.inf, weights.fuse(scored))
    order = np.argsort(-fused, axis=1, kind="stable")[:, :K]
    gains = np.take_along_axis(hits, order, 1) / np.log2(np.arange(order.shape[1]) + 2)
    return float((gains.sum(1) / ideal).mean())


def _ideal(counts: np.ndarray) -> np.ndarray:
    """Return the greatest DCG of queries with so many labels."""
    gains = np.concatenate([[1.0], np.cumsum(1 / np.log2(np.arange(K) + 2))])
    ideal: np.ndarray = gains[np.minimum(counts, K)]
    return np.maximum(ideal, 1e-9)


@dataclass(frozen=True, eq=False)
class Fused:
    """Fused scores of a `shortlist`; `frequency` [L]: training points of all labels."""

    fusion: Fusion
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
        inputs: Inputs | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores float32 [B, k], ids int64 [B, k]) of the best fused scores, best first; -inf and -1 pad.

        `shortlisted`: scores and ids [B, S] for x [B, D or more] of `labels`; equal scores stay in their order. `among`
        [C]: the candidates, which no scorer adds others to; without, all labels. `inputs`: what x was embedded from.
        """
        scored = self.scorers.score(x, inputs, labels, shortlisted, filters, among)
        fused = self.fusion.fuse(scored, self.frequency[scored.ids])
        fused = np.where(scored.ids == PAD, -np.inf, fused)
        order = np.argsort(-fused, axis=1, kind="stable")[:, :k]
        missing = ((0, 0), (0, k - order.shape[1]))
        best = np.pad(np.take_along_axis(fused, order, 1), missing, constant_values=-np.inf)
        return best.astype(np.float32), np.pad(np.take_along_axis(scored.ids, order, 1), missing, constant_values=PAD)
