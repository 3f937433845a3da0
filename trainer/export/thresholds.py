"""Scores from which predictions are right as often as is asked."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from schemas.errors import InputError
from schemas.ragged import Ragged
from schemas.tables import PAD


class Threshold(NamedTuple):
    """`score`: the lowest from which on at least the share `precision` of predictions is right.

    `reached`, `recall` (of all positives) and `predictions` (a query, on average) are those at that score.
    """

    precision: float
    score: float
    reached: float
    recall: float
    predictions: float


class Ranked:
    """Predictions of a split with whether they are right, batch by batch."""

    def __init__(self) -> None:
        self._scores: list[np.ndarray] = []
        self._hits: list[np.ndarray] = []
        self.queries = self.positives = 0

    def add(self, top: np.ndarray, scores: np.ndarray, positives: Ragged) -> None:
        """Count `top` [B, K] label ids with `scores` [B, K] against the positives of B rows."""
        found = top != PAD
        self._scores.append(scores[found])
        self._hits.append(positives.contains(top)[found])
        self.queries += len(top)
        self.positives += len(positives.entries)

    def thresholds(self, precisions: Sequence[float]) -> list[Threshold]:
        """One for each of `precisions` in (0, 1] that is reached somewhere, see `precision_thresholds`."""
        if not self.queries:
            raise InputError("thresholds need scored queries; the split is empty.")
        scores, hits = np.concatenate(self._scores), np.concatenate(self._hits)
        return precision_thresholds(scores, hits, self.positives, self.queries, precisions)


def precision_thresholds(
    scores: np.ndarray, hits: np.ndarray, positives: int, queries: int, precisions: Sequence[float]
) -> list[Threshold]:
    """The lowest score t, among those that occur, with at least p of the predictions of score >= t right, for each p.

    `scores` [N] and `hits` bool [N] are the predictions of all queries together; equal scores stand or fall together.
    A precision that no t reaches has no threshold. Raises InputError for one outside (0, 1].
    """
    wrong = [p for p in precisions if not 0 < p <= 1]
    if wrong:
        raise InputError(f"a precision is a share in (0, 1]; got {', '.join(f'{p:g}' for p in wrong)}.")
    order = np.argsort(-scores, kind="stable")
    ranked, right = scores[order], np.cumsum(hits[order])
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True)[: len(ranked)])  # of each group of equal scores
    share = right[last] / (last + 1)
    found = []
    for precision in precisions:
        enough = np.flatnonzero(share >= precision)
        if enough.size:
            at = int(enough[-1])
            count = int(last[at]) + 1
            recall = float(right[last[at]] / max(positives, 1))
            found.append(Threshold(precision, float(ranked[last[at]]), float(share[at]), recall, count / queries))
    return found
