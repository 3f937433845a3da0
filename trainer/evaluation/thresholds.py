"""Predictions on a split with scores and hits, and thresholds: the scores at which predictions reach a precision."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schemas import PAD
from schemas.errors import InputError
from schemas.ragged import Ragged
from trainer.evaluation.fragments import share_of_fragments
from trainer.inputs import Inputs

DEPTH = 10  # number of predictions per query for thresholds and calibrations


class Threshold(NamedTuple):
    """The lowest `score` at which at least the fraction `precision` of predictions with this score or more is correct.

    `reached` (precision), `recall` (of all positives) and `predictions` (mean number per query) are measured at
    `score`.
    """

    precision: float
    score: float
    reached: float
    recall: float
    predictions: float


def require_fractions(precisions: Sequence[float]) -> None:
    """Raise InputError for a precision outside (0, 1]."""
    wrong = [p for p in precisions if not 0 < p <= 1]
    if wrong:
        raise InputError(f"--precision {', '.join(f'{p:g}' for p in wrong)}: expected a fraction in (0, 1].")


class ScoredPredictions:
    """Predictions on a split with scores and hits, collected batch by batch.

    `tokens` [V] bool: the tokens that are fragments, for a calibration.
    """

    def __init__(self, tokens: np.ndarray | None = None) -> None:
        self._tokens = tokens
        self._scores: list[np.ndarray] = []
        self._hits: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self.fragments = np.zeros(0)  # share of fragments in each query
        self.queries = self.positives = 0

    def collect(self, top: np.ndarray, scores: np.ndarray, positives: Ragged, inputs: Inputs) -> None:
        """Count the best DEPTH of `top` [B, K], for B rows with `inputs`."""
        self.add(top[:, :DEPTH], scores[:, :DEPTH], positives, share_of_fragments(inputs.tokens, self._tokens))

    def add(self, top: np.ndarray, scores: np.ndarray, positives: Ragged, fragments: np.ndarray | float = 0.0) -> None:
        """Count `top` [B, K] label ids with `scores` [B, K] against the positives of B rows.

        `fragments` [B]: the result of `share_of_fragments`.
        """
        predicted = top != PAD
        self.fragments = np.append(self.fragments, np.broadcast_to(fragments, len(top)))
        self._scores.append(scores[predicted])
        self._hits.append(positives.contains(top)[predicted])
        self._counts.append(predicted.sum(axis=1))
        self.queries += len(top)
        self.positives += len(positives.entries)

    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return scores, hits (bool) and query ids (int64) of all predictions, [n] each, a query's best label first.

        Raises InputError if nothing was scored.
        """
        if not self.queries:
            raise InputError("thresholds need held-out rows, but the split is empty. Name another split.")
        counts = np.concatenate(self._counts)
        return np.concatenate(self._scores), np.concatenate(self._hits), np.repeat(np.arange(len(counts)), counts)

    def thresholds(self, precisions: Sequence[float]) -> list[Threshold]:
        """Find, for each p, the lowest score t such that at least a fraction p of the predictions >= t is correct.

        Predictions of all queries are pooled; equal scores are included or excluded together. A precision that no t
        reaches has no threshold. Raises InputError for a precision outside (0, 1], and if nothing was scored.
        """
        require_fractions(precisions)
        scores, hits, _ = self.pairs()
        order = np.argsort(-scores, kind="stable")
        ranked, right = scores[order], np.cumsum(hits[order])
        last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True)[: len(ranked)])  # ends of equal scores
        share = right[last] / (last + 1)
        thresholds = []
        for precision in precisions:
            enough = np.flatnonzero(share >= precision)
            if enough.size:
                group = int(enough[-1])
                end = int(last[group])
                recall = float(right[end] / max(self.positives, 1))
                reached = float(share[group])
                thresholds.append(Threshold(precision, float(ranked[end]), reached, recall, (end + 1) / self.queries))
        return thresholds
