"""Thresholds and probabilities of scores, both learned from the `ScoredPredictions` of a split.

A text with more fragments of words than the split's texts counts as unfamiliar, whatever the scores say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from pipelines.sharding.tokenizer import FILE
from schemas import PAD
from schemas.errors import InputError, TableError, missing_extra
from schemas.layout import DataLayout
from schemas.ragged import Ragged
from schemas.table import Table
from scoring.words import hash_texts
from trainer.inputs import Inputs

_PREFIX = "##"
BYTE_LEVEL = "\u0120"
_STARTS = BYTE_LEVEL + "\u2581"  # the first character of a word's first token in a byte-level BPE, and in SentencePiece


class Pieces(NamedTuple):
    """The tokens [V] of a tokenizer without the mark that tells whether they begin or continue a word.

    `continues`: which tokens continue a word. `mark`: the first character of a word's first token; "" for WordPiece,
    which marks the tokens that continue a word. `unknown`: the token for unknown words. `special`: all special tokens.
    """

    texts: list[str]
    continues: list[bool]
    mark: str
    unknown: int | None
    special: set[int]


def pieces_of(tokenizer: bytes) -> Pieces:
    """Return the pieces of words in `tokenizer`, the content of a tokenizer.json."""
    opened = Tokenizer.from_str(tokenizer.decode())
    vocabulary = opened.get_vocab()
    unknown = vocabulary.get(getattr(opened.model, "unk_token", None) or "")
    special = {number for number, token in opened.get_added_tokens_decoder().items() if token.special}
    first = [token[:1] for token in vocabulary]
    mark = max(_STARTS, key=first.count)
    if isinstance(opened.model, WordPiece) or mark not in first:
        mark = ""
    size = 1 + max(vocabulary.values())
    texts, continues = [""] * size, [False] * size
    for token, number in vocabulary.items():
        texts[number] = token.lstrip(mark) if mark else token.removeprefix(_PREFIX)
        continues[number] = (texts[number] == token) == bool(mark)
    return Pieces(texts, continues, mark, unknown, special)


def fragments_of(tokenizer: bytes) -> np.ndarray:
    """Return which tokens are fragments, bool [V]. `tokenizer`: the content of a tokenizer.json."""
    pieces = pieces_of(tokenizer)
    letters = np.array([len(text) == 1 and text.isalnum() for text in pieces.texts])
    return letters | pieces.continues | (np.arange(len(letters)) == pieces.unknown)


def open_fragments(data: DataLayout, columns: Sequence[str]) -> np.ndarray | None:
    """Return `fragments_of` DATA's tokenizer; None for an encoder that reads `columns` without tokens."""
    if "input_ids" not in columns:
        return None
    return fragments_of(Table.open(data.tokenizer, "tokenizer").read_files()[FILE])


def share_of_fragments(tokens: Ragged | None, fragments: np.ndarray | None) -> np.ndarray | float:
    """Return the share of `fragments` [V] among the `tokens` of B texts, [B]; 0 if either is None."""
    if tokens is None or fragments is None:
        return 0.0
    return np.bincount(tokens.row_of(), fragments[tokens.entries], tokens.rows) / np.maximum(tokens.counts, 1)


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
    wrong = [f"{p:g}" for p in precisions if not 0 < p <= 1]
    if wrong:
        raise InputError(parameter="precision", got=", ".join(wrong), expected="a fraction in (0, 1]")


class ScoredPredictions:
    """Predictions on a split, collected batch by batch; `tokens` [V] bool: which are fragments, for a calibration.

    `known_texts`: hashes, as of `hash_texts`, of texts whose rows do not count. `known_labels`: ids that do not count.
    """

    def __init__(
        self,
        tokens: np.ndarray | None = None,
        known_texts: Sequence[int] = (),
        known_labels: Sequence[int] = (),
    ) -> None:
        self._tokens, self._known_texts = tokens, np.array(known_texts, np.uint64)
        self._known_labels = np.array(known_labels, np.int64)
        self._scores: list[np.ndarray] = []
        self._hits: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self.fragments = np.zeros(0)  # share of fragments in each query
        self.queries = self.positives = 0

    def collect(self, top: np.ndarray, scores: np.ndarray, positives: Ragged, inputs: Inputs) -> None:
        """Count the best DEPTH label ids of `top` [B, K], with `scores` [B, K], for B rows with `inputs`."""
        if len(self._known_texts):
            kept = np.flatnonzero(~np.isin(hash_texts(inputs), self._known_texts))
            top, scores, positives, inputs = top[kept], scores[kept], positives.take(kept), inputs.take(kept)
        if len(self._known_labels):
            top = np.where(np.isin(top, self._known_labels), PAD, top)
            positives = positives.keep(~np.isin(positives.entries, self._known_labels))
        top, scores = top[:, :DEPTH], scores[:, :DEPTH]
        predicted, fragments = top != PAD, share_of_fragments(inputs.tokens, self._tokens)
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
            for group in np.flatnonzero(share >= precision)[-1:].tolist():
                end, reached = int(last[group]), float(share[group])
                recall = float(right[end] / max(self.positives, 1))
                thresholds.append(Threshold(precision, float(ranked[end]), reached, recall, (end + 1) / self.queries))
        return thresholds


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
            raise missing_extra("calibration needs scikit-learn", "trainer") from None
        if hits.all() or not hits.any():
            raise InputError(
                f"{hits.sum():,} of {len(hits):,} held-out predictions are correct, but a calibration needs both "
                "correct and incorrect predictions. Name a larger split that the run was not trained on."
            )

        def fit(rows: np.ndarray | slice) -> Calibration:
            curve = IsotonicRegression(y_min=0.0, y_max=1.0).fit(scores[rows].astype(np.float64), hits[rows])
            return cls(curve.X_thresholds_, curve.y_thresholds_)

        lowest = fit(is_best).score_of(NONE_THRESHOLD)
        most = 1.0 if fragments is None else float(np.quantile(fragments[is_best], FAMILIAR, method="higher"))
        return replace(fit(slice(None)), none_below=np.inf if lowest is None else lowest, most_fragments=most)

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
            limits = facts["none_of_these"]
            none_below = np.inf if limits["score"] is None else float(limits["score"])
            most_fragments = float(limits["fragments"])
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
    is_best, fragments = np.diff(query, prepend=-1) > 0, held_out.fragments[query]
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
    return _measure(curve(scores), is_none, scores, hits, np.diff(query, prepend=-1) > 0)


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
    before, none = facts["uncalibrated"], facts["none_of_these"]
    return (
        f"probabilities of the best 10 labels {of}: ECE {100 * facts['ece']:.2f} %, Brier {facts['brier']:.4f} "
        f'(sigmoids of scores: {100 * before["ece"]:.2f} %, {before["brier"]:.4f}); "none of these" for '
        f"{100 * none['queries']:.1f} % of the queries; the best label is incorrect for {100 * none['wrong']:.1f} % of "
        "these queries"
    )
