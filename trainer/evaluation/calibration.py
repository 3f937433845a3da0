"""Calibration: an isotonic curve from scores to the probability that a predicted label is correct.

scikit-learn fits the curve on held-out rows; NumPy evaluates the curve. A second curve, of the queries' best labels
alone, gives the score below which none of the labels counts as correct: at the same score, a best label is more often
correct than a label at a later rank.

Both speak of texts like the held-out texts. A text of another language or field may score as high. Its words are not
among the tokens, and fall into fragments: a text with a greater share of fragments than FAMILIAR of the held-out texts
counts as "none of these" at any score.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from schemas.errors import InputError, MissingExtra, TableError
from trainer.evaluation.thresholds import ScoredPredictions

BINS = 15
FAMILIAR = 0.99
NONE_THRESHOLD = 0.5  # a query whose best label is correct with a lower probability counts as "none of these"


@dataclass(frozen=True)
class Calibration:
    """Linear interpolation through `scores` and `probabilities`, both ascending [n]; constant outside this range.

    A query counts as "none of these" if its best label has a score below `none_below`, or if more than the fraction
    `most_fragments` of its tokens are fragments.
    """

    scores: np.ndarray
    probabilities: np.ndarray
    none_below: float = np.inf
    most_fragments: float = 1.0

    @classmethod
    def fit(
        cls, scores: np.ndarray, hits: np.ndarray, is_best: np.ndarray, fragments: np.ndarray | None = None
    ) -> "Calibration":
        """Fit to predictions with `scores` [n]; bool [n]: `hits`, correct predictions; `is_best`, a query's best label.

        `fragments` [n]: the share of fragments in the predictions' queries.

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

        def fit(rows: np.ndarray | slice) -> Calibration:
            curve = IsotonicRegression(y_min=0.0, y_max=1.0).fit(scores[rows].astype(np.float64), hits[rows])
            return cls(curve.X_thresholds_, curve.y_thresholds_)

        none_below = fit(is_best).score_of(NONE_THRESHOLD)
        most = 1.0 if fragments is None else float(np.quantile(fragments[is_best], FAMILIAR, method="higher"))
        none_below = np.inf if none_below is None else none_below
        return replace(fit(slice(None)), none_below=none_below, most_fragments=most)

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

    def described(self, measured: dict[str, Any]) -> dict[str, Any]:
        """Return the result of `measure` with the curve and the limits of "none of these", as `read` reads them."""
        score = self.none_below if np.isfinite(self.none_below) else None
        limits = {"probability": NONE_THRESHOLD, "score": score, "fragments": self.most_fragments}
        curve = {"scores": self.scores.tolist(), "probabilities": self.probabilities.tolist()}
        return {**measured, "curve": curve, "none_of_these": {**measured["none_of_these"], **limits}}

    @classmethod
    def read(cls, facts: Any, place: str) -> "Calibration":
        """Read the `curve` in `facts` of the manifest at `place`. Raises TableError if there is no curve."""
        try:
            x, y = (np.array(facts["curve"][name], float) for name in ("scores", "probabilities"))
            none_below = facts["none_of_these"]["score"]
            none_below = np.inf if none_below is None else float(none_below)
            most_fragments = float(facts["none_of_these"]["fragments"])
            rising = x.shape == y.shape == (len(x),) and np.isfinite(x).all() and (np.diff([x, y]) >= 0).all()
            if not (rising and len(x) and 0 <= y[0] <= y[-1] <= 1):
                raise ValueError("the probabilities do not increase")
        except (ValueError, KeyError, TypeError) as error:
            raise TableError(f"{place}: not a calibration file: {error}. Export the run again.") from None
        return cls(x, y, none_below, most_fragments)

    def is_none(self, scores: np.ndarray, fragments: np.ndarray | float) -> np.ndarray:
        """Return which queries count as "none of these", by the scores and shares of fragments, both of any shape."""
        return (scores < self.none_below) | (fragments > self.most_fragments)


def calibrate(held_out: ScoredPredictions) -> tuple[Calibration, dict[str, Any]]:
    """Fit a curve to all predictions; evaluate each half of the queries with a curve fitted to the other half.

    Raises the same errors as `Calibration.fit`.
    """
    scores, hits, query = held_out.pairs()
    is_best, fragments = _is_best(query), held_out.fragments[query]
    found, is_none = np.zeros(len(scores)), np.zeros(len(scores), bool)
    for half in (0, 1):
        own = query % 2 == half
        curve = Calibration.fit(scores[~own], hits[~own], is_best[~own], fragments[~own])
        found[own], is_none[own] = curve(scores[own]), curve.is_none(scores[own], fragments[own])
    return Calibration.fit(scores, hits, is_best, fragments), _measure(found, is_none, scores, hits, is_best)


def measure(curve: Calibration, predictions: ScoredPredictions) -> dict[str, Any]:
    """Return the ECE and Brier score of the curve's probabilities of `predictions`, and of the sigmoids of the scores.

    `none_of_these`: the fraction of queries that count as "none of these", and the fraction of the best labels of these
    queries that are in fact incorrect.
    """
    scores, hits, query = predictions.pairs()
    is_none = curve.is_none(scores, predictions.fragments[query])
    return _measure(curve(scores), is_none, scores, hits, _is_best(query))


def _is_best(query: np.ndarray) -> np.ndarray:
    return np.diff(query, prepend=-1) > 0


def _measure(
    probabilities: np.ndarray, is_none: np.ndarray, scores: np.ndarray, hits: np.ndarray, is_best: np.ndarray
) -> dict[str, Any]:
    none = is_best & is_none
    sigmoids = np.exp(-np.logaddexp(0, -scores.astype(np.float64)))
    return {
        **_errors(probabilities, hits),
        "uncalibrated": _errors(sigmoids, hits),
        "none_of_these": {
            "queries": float(none.sum() / is_best.sum()),
            "wrong": float((~hits[none]).sum() / max(1, none.sum())),
        },
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
