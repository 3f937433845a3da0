"""Calibration: an isotonic curve from scores to the probability that a predicted label is correct.

scikit-learn fits the curve on held-out rows; NumPy evaluates the curve.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.errors import InputError, MissingExtra, TableError
from trainer.evaluation.thresholds import ScoredPredictions

BINS = 15
NONE_THRESHOLD = 0.5  # a query whose best label has a lower probability counts as "none of these"


@dataclass(frozen=True)
class Calibration:
    """Linear interpolation through `scores` and `probabilities`, both ascending [n]; constant outside this range."""

    scores: np.ndarray
    probabilities: np.ndarray

    @classmethod
    def fit(cls, scores: np.ndarray, hits: np.ndarray) -> "Calibration":
        """Fit to predictions with `scores` [n]; `hits` [n] bool: True for correct predictions.

        Raises InputError if all or no predictions are correct, or if scikit-learn is not installed.
        """
        try:
            from sklearn.isotonic import IsotonicRegression
        except ImportError:
            raise MissingExtra("calibration needs scikit-learn", "fusion") from None
        if hits.all() or not hits.any():
            raise InputError(
                f"{hits.sum():,} of {len(hits):,} held-out predictions are correct, but a calibration needs both "
                "correct and incorrect predictions. Name a larger split that the run was not trained on."
            )
        curve = IsotonicRegression(y_min=0.0, y_max=1.0).fit(scores.astype(np.float64), hits)
        return cls(curve.X_thresholds_, curve.y_thresholds_)

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Return the probabilities of labels with `scores` of any shape, float32."""
        return np.interp(scores, self.scores, self.probabilities).astype(np.float32)

    def score_of(self, probability: float) -> float | None:
        """Return the lowest score that has at least this `probability`; None if no score has this probability."""
        place = int(np.searchsorted(self.probabilities, probability))
        if place == len(self.scores):
            return None
        ends = slice(max(0, place - 1), place + 1)
        return float(np.interp(probability, self.probabilities[ends], self.scores[ends]))

    def numbers(self) -> dict[str, list[float]]:
        """Return the curve as lists of numbers, which `read` accepts."""
        return {name: numbers.tolist() for name, numbers in vars(self).items()}

    @classmethod
    def read(cls, numbers: Any, place: str) -> "Calibration":
        """Read a curve from `numbers` in the manifest at `place`. Raises TableError if `numbers` are not a curve."""
        try:
            x, y = (np.array(numbers[name], float) for name in ("scores", "probabilities"))
            rising = x.shape == y.shape == (len(x),) and np.isfinite(x).all() and (np.diff([x, y]) >= 0).all()
            if not (rising and len(x) and 0 <= y[0] <= y[-1] <= 1):
                raise ValueError("the probabilities do not increase")
        except (ValueError, KeyError, TypeError) as error:
            raise TableError(f"{place}: not a calibration file: {error}. Export the run again.") from None
        return cls(x, y)


def calibrate(held_out: ScoredPredictions) -> tuple[Calibration, dict[str, Any]]:
    """Fit a curve to all predictions; evaluate each half of the queries with a curve fitted to the other half.

    Raises the same errors as `Calibration.fit`.
    """
    scores, hits, query = held_out.pairs()
    found = np.zeros(len(scores))
    for half in (0, 1):
        own = query % 2 == half
        found[own] = Calibration.fit(scores[~own], hits[~own])(scores[own])
    return Calibration.fit(scores, hits), measure(found, held_out)


def measure(probabilities: np.ndarray, predictions: ScoredPredictions) -> dict[str, Any]:
    """Return the ECE and Brier score of the `probabilities` [n] of `predictions`, and of the sigmoids of the scores.

    `none_of_these`: the fraction of queries with a best label that is probably incorrect, and the fraction of these
    labels that are in fact incorrect.
    """
    scores, hits, query = predictions.pairs()
    first = np.flatnonzero(np.diff(query, prepend=-1))
    none = first[probabilities[first] < NONE_THRESHOLD]
    sigmoids = np.exp(-np.logaddexp(0, -scores.astype(np.float64)))
    return {
        **_errors(probabilities, hits),
        "uncalibrated": _errors(sigmoids, hits),
        "none_of_these": {"queries": len(none) / len(first), "wrong": float((~hits[none]).sum() / max(1, len(none)))},
    }


def _errors(probabilities: np.ndarray, hits: np.ndarray) -> dict[str, float]:
    """Return the Brier score, and the expected calibration error over BINS equal bins (Guo et al., 2017, eq. 3)."""
    apart = probabilities - hits
    of_bins = np.bincount(np.minimum((probabilities * BINS).astype(np.int64), BINS - 1), apart, BINS)
    return {"ece": float(np.abs(of_bins).sum() / len(hits)), "brier": float(np.mean(apart**2))}


def describe_calibration(facts: dict[str, Any], of: str) -> str:
    """Describe the result of `measure`; `of`: the queries, in words."""
    before, none = facts["uncalibrated"], facts["none_of_these"]
    return (
        f"probabilities of the best 10 labels {of}: ECE {100 * facts['ece']:.2f} %, Brier {facts['brier']:.4f} "
        f'(sigmoids of scores: {100 * before["ece"]:.2f} %, {before["brier"]:.4f}); "none of these" for '
        f"{100 * none['queries']:.1f} % of the queries; the best label is incorrect for {100 * none['wrong']:.1f} % of "
        "these queries"
    )
