"""Score fusion by weights: a classifier's score, its labels' texts and the votes of a memory, in one sum.

Weights are found on validation queries, one at a time over powers of two, for the best nDCG@5: three numbers that a few
hundred queries are enough for, and that a model trained on more data can keep.
"""

import json
from dataclasses import asdict, dataclass

import numpy as np

from schemas import PAD
from schemas.errors import TableError
from schemas.ragged import Ragged
from trainer.evaluation.fusion.scored import Scored

FORMAT = 1
K = 5  # of the nDCG that weights are chosen by
_STEPS = (0.0, *(2.0**power for power in range(-6, 3)))
_ROUNDS = 2


@dataclass(frozen=True)
class Weights:
    """s + `texts` t + `votes` v. `logistic`: s is the classifier's probability; else its score over `unit`."""

    texts: float = 0.0
    votes: float = 0.0
    unit: float = 1.0
    logistic: bool = False

    @classmethod
    def fit(cls, scored: Scored, relevant: Ragged, logistic: bool) -> "Weights":
        """Find the weights with the best nDCG of validation queries; `relevant`: their labels."""
        unit = 1.0 if logistic else float(np.std(scored.scores[scored.ids != PAD])) or 1.0
        weights = cls(unit=unit, logistic=logistic)
        hits = relevant.contains(scored.ids)
        ideal = _ideal(relevant.counts)
        best = _ndcg(weights, scored, hits, ideal)
        for _ in range(_ROUNDS):
            for name in ("votes", "texts"):
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
        return scores + self.texts * scored.texts + self.votes * scored.votes

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
            numbers = np.array([weights.texts, weights.votes, weights.unit], float)
            if not np.isfinite(numbers).all() or numbers[2] <= 0:
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
