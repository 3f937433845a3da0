"""Calibration: the probability that a predicted label is right, by its score, learned from held-out rows.

An isotonic curve, or a sigmoid with a temperature and an offset. scikit-learn fits it; numpy applies its numbers.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from schemas.errors import InputError, MissingExtra, TableError
from trainer.evaluation.thresholds import ScoredPredictions

Kind = Literal["isotonic", "temperature"]
BINS = 15
EVEN = 0.5  # a query whose best label is less likely right has "none of these"


@dataclass(frozen=True)
class Calibration:
    """Straight lines through (`scores`, `probabilities`), ascending [n]; or sigmoid((score - offset) / temperature).

    The offset is fitted too: scores of a softmax, cosines and fused scores have no zero of their own.
    """

    kind: Kind
    scores: tuple[float, ...] = ()
    probabilities: tuple[float, ...] = ()
    temperature: float = 1.0
    offset: float = 0.0

    @classmethod
    def fit(cls, kind: Kind, scores: np.ndarray, hits: np.ndarray) -> "Calibration":
        """Learn from predictions with `scores` [n], of which `hits` [n] bool are right.

        Raises InputError where all or none are right, and without scikit-learn.
        """
        try:
            from sklearn.isotonic import IsotonicRegression
            from sklearn.linear_model import LogisticRegression
        except ImportError:
            raise MissingExtra("calibration needs scikit-learn", "fusion") from None
        if hits.all() or not hits.any():
            raise InputError(
                f"{len(hits):,} held-out predictions, {'all' if len(hits) and hits.all() else 'none'} of them right: "
                "nothing to calibrate by. Name a larger split that the run was not trained on."
            )
        scores = scores.astype(np.float64)
        if kind == "isotonic":
            curve = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(scores, hits)
            return cls(kind, tuple(curve.X_thresholds_.tolist()), tuple(curve.y_thresholds_.tolist()))
        center, unit = scores.mean(), scores.std() or 1.0
        sigmoid = LogisticRegression(C=np.inf).fit((scores[:, None] - center) / unit, hits)
        slope, height = float(sigmoid.coef_[0, 0]), float(sigmoid.intercept_[0])
        if slope <= 0:
            raise InputError("held-out predictions of a higher score are right less often: calibrate by isotonic.")
        return cls(kind, temperature=float(unit / slope), offset=float(center - unit * height / slope))

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Return the probabilities of labels with `scores` of any shape, float32; 0 of -inf."""
        if self.kind == "isotonic":
            found = np.interp(scores, self.scores, self.probabilities)
        else:
            found = sigmoid((scores.astype(np.float64) - self.offset) / self.temperature)
        return np.where(np.isneginf(scores), 0, found).astype(np.float32)

    def score_of(self, probability: float) -> float | None:
        """Return the lowest score with at least this `probability`; None where no score has it."""
        if self.kind == "temperature":
            odds = probability / (1 - probability) if probability < 1 else math.inf
            return self.offset + self.temperature * math.log(odds) if 0 < odds < math.inf else None
        place = int(np.searchsorted(self.probabilities, probability))
        if place in (0, len(self.probabilities)):
            return None if place else self.scores[0]
        before, after = slice(place - 1, place), slice(place, place + 1)
        ends = [np.concatenate([each[before], each[after]]) for each in (self.probabilities, self.scores)]
        return float(np.interp(probability, *ends))

    def to_json(self) -> bytes:
        """Return the calibration as a file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes, place: str) -> "Calibration":
        """Read the content of a file, which lies at `place`. Raises TableError for another file."""
        try:
            body = json.loads(data)
            curve = cls(**{**body, **{name: tuple(map(float, body[name])) for name in ("scores", "probabilities")}})
            x, y = np.array(curve.scores), np.array(curve.probabilities)
            straight = curve.kind == "isotonic" and len(x) == len(y) > 0 and (np.diff(x) >= 0).all()
            known = curve.kind in get_args(Kind) and (straight or curve.kind == "temperature")
            ends = np.array([*x, curve.temperature, curve.offset], float)
            if not (known and np.isfinite(ends).all() and curve.temperature > 0 and (np.diff(y) >= 0).all()):
                raise ValueError("no rising curve")
            if len(y) and not 0 <= y[0] <= y[-1] <= 1:
                raise ValueError("probabilities outside [0, 1]")
        except (ValueError, KeyError, TypeError) as error:
            raise TableError(f"{place}: not a calibration: {error}. Export the run again.") from None
        return curve


def sigmoid(scores: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-score))."""
    return np.exp(-np.logaddexp(0, -scores))


def calibrate(kind: Kind, held_out: ScoredPredictions) -> tuple[Calibration, dict[str, Any]]:
    """Learn from all predictions; the facts beside are of either half of the queries, by the curve of the other.

    Raises as `Calibration.fit`.
    """
    scores, hits, query = held_out.pairs()
    found = np.zeros(len(scores))
    for half in (0, 1):
        own = query % 2 == half
        found[own] = Calibration.fit(kind, scores[~own], hits[~own])(scores[own])
    return Calibration.fit(kind, scores, hits), measure(found, held_out)


def measure(probabilities: np.ndarray, predictions: ScoredPredictions) -> dict[str, Any]:
    """Return ECE and Brier score of the `probabilities` [n] of `predictions`, and of sigmoids of their scores.

    `none_of_these`: the share of queries whose best label is less likely right than wrong, and how often it is wrong.
    """
    scores, hits, query = predictions.pairs()
    first = np.flatnonzero(np.diff(query, prepend=-1))
    unlikely = first[probabilities[first] < EVEN]
    none = {
        "queries": len(unlikely) / max(1, len(first)),
        "right": float(np.mean(~hits[unlikely])) if len(unlikely) else 1.0,
    }
    uncalibrated = _errors(sigmoid(scores.astype(np.float64)), hits)
    return {**_errors(probabilities, hits), "uncalibrated": uncalibrated, "none_of_these": none}


def _errors(probabilities: np.ndarray, hits: np.ndarray) -> dict[str, float]:
    """Return the expected calibration error over BINS of equal width (Guo et al., 2017, equation 3), and Brier's."""
    of = np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(of, probabilities - hits, BINS)
    brier = float(np.mean((probabilities - hits) ** 2)) if len(hits) else 0.0
    return {"ece": float(np.abs(gaps).sum() / max(1, len(hits))), "brier": brier}
