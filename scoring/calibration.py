"""Probabilities of scores, and bounds of the precision from a score on, learned from `ScoredPredictions` of a split.

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
from schemas.errors import InputError, TableError, missing_extra, option
from schemas.layout import DataLayout
from schemas.ragged import Ragged, is_first_key
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


_WORD, _SPECIAL, _LETTER, _CONTINUES, _UNKNOWN = range(5)  # kinds of tokens


def fragments_of(tokenizer: bytes) -> np.ndarray:
    """Return the kinds of tokens, int8 [V], by which fragments are told. `tokenizer`: content of a tokenizer.json."""
    pieces = pieces_of(tokenizer)
    kinds = np.array([_LETTER if len(text) == 1 and text.isalnum() else _WORD for text in pieces.texts], np.int8)
    kinds[pieces.continues] = _CONTINUES
    kinds[[*pieces.special]] = _SPECIAL
    if pieces.unknown is not None:
        kinds[pieces.unknown] = _UNKNOWN
    return kinds


def open_fragments(data: DataLayout, columns: Sequence[str]) -> np.ndarray | None:
    """Return `fragments_of` DATA's tokenizer; None for an encoder that reads `columns` without tokens."""
    if "input_ids" not in columns:
        return None
    return fragments_of(Table.open(data.tokenizer, "tokenizer").read_files()[FILE])


def share_of_fragments(tokens: Ragged | None, fragments: np.ndarray | None) -> np.ndarray | float:
    """Return the share of fragments, by kinds `fragments` [V], among the `tokens` of B texts, [B]; 0 if one is None.

    A text begins with a word, with or without a mark. A single letter is a word, unless the next token continues it.
    """
    if tokens is None or fragments is None:
        return 0.0
    kinds, first = fragments[tokens.entries], is_first_key(tokens.row_of())
    first[1:] |= kinds[:-1] == _SPECIAL
    continues = (kinds == _CONTINUES) & ~first
    parts = (kinds == _UNKNOWN) | continues
    parts[:-1] |= (kinds[:-1] == _LETTER) & continues[1:]
    return np.bincount(tokens.row_of(), parts, tokens.rows) / np.maximum(tokens.counts, 1)


DEPTH = 10  # number of best labels of a query that probabilities are learned from and measured on
DEEPEST = 100  # number of best labels of a query that bounds of a precision count
SURE = 1.6449  # standard deviations below which 5 % of a normal distribution lie
_STEPS = 1000  # bounds of a precision that are kept are apart by at least 1 / _STEPS


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
        self._texts: list[np.ndarray] = []
        self._cut_at = -np.inf  # labels that were not collected have at most this score
        self.fragments = np.zeros(0)  # share of fragments in each query
        self.queries = 0

    def collect(self, top: np.ndarray, scores: np.ndarray, positives: Ragged, inputs: Inputs) -> None:
        """Count the label ids `top` [B, K], best first, with `scores` [B, K], for B rows with `inputs`."""
        texts = hash_texts(inputs)
        if len(self._known_texts):
            kept = np.flatnonzero(~np.isin(texts, self._known_texts))
            texts, top, scores = texts[kept], top[kept], scores[kept]
            positives, inputs = positives.take(kept), inputs.take(kept)
        self._cut_at = max(self._cut_at, scores[:, -1].max(initial=-np.inf))
        if len(self._known_labels):
            top = np.where(np.isin(top, self._known_labels), PAD, top)
            positives = positives.keep(~np.isin(positives.entries, self._known_labels))
        predicted, fragments = top != PAD, share_of_fragments(inputs.tokens, self._tokens)
        self.fragments = np.append(self.fragments, np.broadcast_to(fragments, len(top)))
        self._scores.append(scores[predicted])
        self._hits.append(positives.contains(top)[predicted])
        self._counts.append(predicted.sum(axis=1))
        self._texts.append(texts)
        self.queries += len(top)

    def pairs(self, depth: float = DEPTH) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return scores, hits (bool) and query ids (int64) of the best `depth` labels of a query, [n] each, best first.

        Raises InputError if nothing was scored.
        """
        if not self.queries:
            raise InputError("a calibration needs held-out rows, but the split is empty. Name another split.")
        counts = np.concatenate(self._counts)
        query = np.repeat(np.arange(len(counts)), counts)
        kept = np.arange(len(query)) - (np.cumsum(counts) - counts)[query] < depth
        return np.concatenate(self._scores)[kept], np.concatenate(self._hits)[kept], query[kept]

    def bounds(self) -> "PrecisionBounds":
        """Return bounds of the precision of all labels at or above a score. Raises InputError if nothing was scored."""
        scores, hits, query = self.pairs(depth=np.inf)
        texts = np.unique(np.concatenate(self._texts), return_inverse=True)[1]
        return PrecisionBounds.fit(scores, hits, texts[query], self._cut_at)


@dataclass(frozen=True)
class PrecisionBounds:
    """Lower bounds of the precision of all labels at or above some `scores`, both ascending float64 [n].

    At a score, the true share of correct labels is at least the bound with a confidence of 95 %, for texts like those
    held out, of which `texts` differ. Equal texts count as one observation: the precision is a ratio of sums over
    texts, with the variance of a ratio estimator (Cochran, Sampling Techniques, 1977, section 6.3) and Wilson's bound.
    `shares` [n]: the share of correct labels of the held-out texts.
    """

    scores: np.ndarray
    bounds: np.ndarray
    shares: np.ndarray
    texts: int

    @classmethod
    def fit(cls, scores: np.ndarray, hits: np.ndarray, text: np.ndarray, cut_at: float = -np.inf) -> "PrecisionBounds":
        """Fit to predictions [n] with `scores`, `hits` bool and the number of their `text`; ignore scores to `cut_at`.

        Every distinct score is a candidate; a higher score is kept if its bound is higher.
        """
        order = np.argsort(-scores, kind="stable")
        ranked, right, text = scores[order].astype(np.float64), hits[order].astype(np.float64), text[order]
        before, right_before = _before(text, right)
        count, correct = np.arange(1.0, len(ranked) + 1), np.cumsum(right)
        squares = np.cumsum(2 * before + 1)  # sums over texts of n², nh and h², for n labels of which h are correct
        products = np.cumsum(right_before + right * (before + 1))
        hit_squares = np.cumsum(right * (2 * right_before + 1))
        texts = np.maximum(np.cumsum(before == 0), 2)
        share = correct / count
        variance = np.maximum(hit_squares - 2 * share * products + share**2 * squares, 0) * texts / (texts - 1)
        spread = share * (1 - share) * count  # of as many independent labels
        clustering = np.where(spread > 0, variance / np.where(spread > 0, spread, 1), squares / count)
        bounds = _wilson(share, count / np.maximum(clustering, 1))
        is_last = np.append(ranked[1:] != ranked[:-1], True)[: len(ranked)]
        kept = np.flatnonzero(is_last & (ranked > cut_at))[::-1]
        steps = np.floor(bounds[kept] * _STEPS)
        kept = kept[steps > np.maximum.accumulate(np.append(0, steps))[:-1]]
        return cls(ranked[kept], bounds[kept], share[kept], len(np.unique(text)))

    def score_of(self, precision: float) -> float:
        """Return the lowest score at which the bound is at least `precision`. Raises InputError if there is none."""
        place = int(np.searchsorted(self.bounds, precision))
        if place < len(self.bounds):
            return float(self.scores[place])
        highest = f"{self.bounds[-1]:.3f}" if len(self.bounds) else "none"
        raise InputError(
            f"{option('precision', precision)}: the highest precision that this model meets on its {self.texts:,} "
            f"held-out texts, at a confidence of 95 %, is {highest}. Give a lower one, or calibrate on more rows."
        )

    def described(self) -> dict[str, Any]:
        """Return it as `read` reads it."""
        columns = {name: getattr(self, name).tolist() for name in ("scores", "bounds", "shares")}
        return {**columns, "texts": self.texts}

    @classmethod
    def read(cls, facts: Any) -> "PrecisionBounds":
        """Raises ValueError, KeyError or TypeError for other facts than those of `described`."""
        scores, bounds, shares = (np.array(facts[name], float) for name in ("scores", "bounds", "shares"))
        read = cls(scores, bounds, shares, int(facts["texts"]))
        if not (read.scores.shape == read.bounds.shape and (np.diff([read.scores, read.bounds]) > 0).all()):
            raise ValueError("the bounds do not increase")
        return read


def _before(text: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many earlier entries have the same `text` [n], and how many of these are `right`, float64 [n]."""
    order = np.argsort(text, kind="stable")
    starts = np.flatnonzero(np.diff(text[order], prepend=-1))
    sizes = np.diff(np.append(starts, len(text)))
    sums = np.cumsum(right[order]) - right[order]
    before, right_before = np.empty(len(text)), np.empty(len(text))
    before[order] = np.arange(len(text)) - np.repeat(starts, sizes)
    right_before[order] = sums - np.repeat(sums[starts], sizes)
    return before, right_before


def _wilson(share: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the lower end of Wilson's one-sided interval of 95 % for a `share` of `count` observations."""
    z = SURE**2 / count
    return (share + z / 2 - np.sqrt(z * (share * (1 - share) + z / 4))) / (1 + z)


NO_BOUNDS = PrecisionBounds(np.empty(0), np.empty(0), np.empty(0), 0)
BINS = 15
FAMILIAR = 0.99
NONE_THRESHOLD = 0.5  # a query whose best label is correct with a lower probability counts as "none of these"


@dataclass(frozen=True)
class Calibration:
    """Linear interpolation through `scores` and `probabilities`, both ascending [n]; constant outside this range.

    A query counts as "none of these" if its best label has a score below `none_below`, or if more than the fraction
    `most_fragments` of its tokens are fragments. `precision`: bounds of the precision from a score on.
    """

    scores: np.ndarray
    probabilities: np.ndarray
    none_below: float = np.inf
    most_fragments: float = 1.0
    precision: PrecisionBounds = NO_BOUNDS

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
        none = {**measured["none_of_these"], **limits}
        return {**measured, "curve": curve, "precision": self.precision.described(), "none_of_these": none}

    @classmethod
    def read(cls, facts: Any, place: str) -> "Calibration":
        """Read the `curve` in `facts` of the manifest at `place`. Raises TableError if there is no curve."""
        try:
            x, y = (np.array(facts["curve"][name], float) for name in ("scores", "probabilities"))
            bounds = PrecisionBounds.read(facts["precision"])
            limits = facts["none_of_these"]
            none_below = np.inf if limits["score"] is None else float(limits["score"])
            most_fragments = float(limits["fragments"])
            rising = x.shape == y.shape == (len(x),) and np.isfinite(x).all() and (np.diff([x, y]) >= 0).all()
            if not (rising and len(x) and 0 <= y[0] <= y[-1] <= 1):
                raise ValueError("the probabilities do not increase")
        except (ValueError, KeyError, TypeError) as error:
            raise TableError(f"{place}: not a calibration file: {error}. Export the run again.") from None
        return cls(x, y, none_below, most_fragments, bounds)

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
    curve = replace(Calibration.fit(scores, hits, is_best, fragments), precision=held_out.bounds())
    return curve, _measure(found, is_none, scores, hits, is_best)


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
    none, bins = is_best & is_none, _bins_of(probabilities)
    counts, *sums = (np.bincount(bins, of, BINS) for of in (None, probabilities, hits))
    some = counts > 0
    probability, correct = (each[some] / counts[some] for each in sums)
    return {
        **_errors(probabilities, hits),
        "bins": {
            "predictions": counts[some].tolist(),
            "probability": probability.tolist(),
            "correct": correct.tolist(),
        },
        "uncalibrated": _errors(sigmoid(scores.astype(np.float64)), hits),
        "none_of_these": {
            "queries": float(none.sum() / is_best.sum()),
            "wrong": float((~hits[none]).sum() / max(1, none.sum())),
        },
    }


def sigmoid(scores: np.ndarray) -> np.ndarray:
    """Return the sigmoids of `scores` of any shape."""
    return np.exp(-np.logaddexp(0, -scores))


def _bins_of(probabilities: np.ndarray) -> np.ndarray:
    return np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)


def _errors(probabilities: np.ndarray, hits: np.ndarray) -> dict[str, float]:
    """Return the Brier score, and the expected calibration error over BINS equal bins (Guo et al., 2017, eq. 3)."""
    apart = probabilities - hits
    of_bins = np.bincount(_bins_of(probabilities), apart, BINS)
    return {"ece": float(np.abs(of_bins).sum() / len(hits)), "brier": float(np.mean(apart**2))}


def describe_calibration(facts: dict[str, Any], of: str) -> str:
    before, none = facts["uncalibrated"], facts["none_of_these"]
    return (
        f"probabilities of the best 10 labels {of}: ECE {100 * facts['ece']:.2f} %, Brier {facts['brier']:.4f} "
        f'(sigmoids of scores: {100 * before["ece"]:.2f} %, {before["brier"]:.4f}); "none of these" for '
        f"{100 * none['queries']:.1f} % of the queries; the best label is incorrect for {100 * none['wrong']:.1f} % of "
        "these queries"
    )
