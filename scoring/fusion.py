"""Fused scores: features of a shortlist, weights, NGAME's stored tree, and scores from outside."""

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np

from schemas import PAD
from schemas.errors import TableError
from schemas.ragged import Ragged, is_repeated, pad_columns, take_per_row
from scoring.linear import LinearRanker
from scoring.memory import Memory, votes_of
from trainer.inputs import Inputs
from trainer.modules import find_named, name_of

# Files of a fusion, in a run and in an export.
FILES = {"tree.json": "fusion.json", "weights.json": "fusion-weights.json", "score.json": "fusion-score.json"}
TREE_FORMAT = 2
_LEAF = -1
_INTEGERS = ("feature", "left", "right")  # the other arrays are float64


class ShortlistScores(NamedTuple):
    """Scores of S labels per query: `ids` [B, S] int64, padded with -1; the other fields [B, S], 0 if missing."""

    ids: np.ndarray
    scores: np.ndarray
    texts: np.ndarray
    votes: np.ndarray
    linear: np.ndarray


class Fusion(ABC):
    """A score made of the scores in a shortlist."""

    @property
    def reads_texts(self) -> bool:
        """Whether it uses the scores of labels' texts."""
        return True

    @abstractmethod
    def parts(self, scored: ShortlistScores, frequency: Any) -> dict[str, np.ndarray]:
        """Return the terms of the fused scores by name, [B, S] each, for labels with `frequency` [B, S]."""

    def fuse(self, scored: ShortlistScores, frequency: Any = None) -> np.ndarray:
        """Return the fused scores [B, S], the sum of all `parts`."""
        return sum(self.parts(scored, frequency).values(), np.float64(0))

    @abstractmethod
    def to_json(self) -> bytes:
        """Return the content of a file, which `parse` reads."""

    @classmethod
    @abstractmethod
    def parse(cls, data: bytes, place: str) -> "Fusion":
        """Read the content of a file at `place`. Raises TableError for an invalid file."""


@dataclass(frozen=True, eq=False)
class FusionTree(Fusion):
    """T(d) for d = (E(z).x, w.x, f): node i goes `left` [n] if d[feature] <= threshold, else `right`; 0 is the root.

    A leaf has feature -1 and `value` [n]. Descriptors are float32, as in scikit-learn's comparisons. `units` [2]:
    divisors of both scores, applied before the scores are added to T(d).
    """

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray
    units: np.ndarray

    def predict(self, label_scores: np.ndarray, scores: np.ndarray, frequency: np.ndarray) -> np.ndarray:
        """Return T(d) as float64 of the arrays' common shape; all pairs descend the tree together, level by level."""
        described = np.stack(np.broadcast_arrays(label_scores, scores, frequency), axis=-1).astype(np.float32)
        flat = described.reshape(-1, 3)
        node = np.zeros(len(flat), np.int64)
        going = np.flatnonzero(self.feature[node] != _LEAF)
        while len(going):
            inner = node[going]
            goes_left = flat[going, self.feature[inner]] <= self.threshold[inner]
            node[going] = np.where(goes_left, self.left[inner], self.right[inner])
            going = going[self.feature[node[going]] != _LEAF]
        return self.value[node].reshape(described.shape[:-1])

    def parts(self, scored: ShortlistScores, frequency: np.ndarray) -> dict[str, np.ndarray]:
        """Return E(z).x and w.x, divided by `units`, and T(d)."""
        text, vector = scored.texts / self.units[0], scored.scores / self.units[1]
        return {"text": text, "vector": vector, "tree": self.predict(scored.texts, scored.scores, frequency)}

    def to_json(self) -> bytes:
        arrays = {name: array.tolist() for name, array in vars(self).items()}
        return json.dumps({"format": TREE_FORMAT, **arrays}).encode()

    @classmethod
    def parse(cls, data: bytes, place: str) -> "FusionTree":
        """Parse the tree from the content of a file at `place`. Raises TableError for an invalid file."""
        try:
            body = json.loads(data)
            kinds = {field.name: np.int64 if field.name in _INTEGERS else np.float64 for field in fields(cls)}
            tree = cls(**{name: np.array(body[name], kind) for name, kind in kinds.items()})
            if body["format"] != TREE_FORMAT:
                raise ValueError(f"format {body['format']}, expected {TREE_FORMAT}")
            nodes, inner = len(tree.feature), np.flatnonzero(tree.feature != _LEAF)
            shapes = {array.shape for name, array in vars(tree).items() if name != "units"}
            is_whole = nodes > 0 and shapes == {(nodes,)} and tree.units.shape == (2,) and (tree.units > 0).all()
            if is_whole:  # every node comes before its children, so every path ends
                children = np.stack([tree.left[inner], tree.right[inner]])
                named = (tree.feature >= _LEAF) & (tree.feature < 3)
                is_whole = named.all() and ((children > inner) & (children < nodes)).all()
            if not is_whole:
                raise ValueError("the nodes are inconsistent")
        except (ValueError, KeyError, TypeError) as error:
            raise TableError(f"{place}: not a fusion tree: {error}. Fit the fusion again.") from None
        return tree


ADDED_LABELS = 100  # maximum number of labels that a memory, and a linear ranker, each add to the shortlist


class PairScores(Protocol):
    """Label rows of an export or of a rank, as an array or a tensor, that score x [B, D or more]."""

    def score(self, x: Any, ids: np.ndarray, /) -> np.ndarray:
        """Multiply the rows of labels `ids` int64 [B, S] by x: float32 [B, S]; scores of padding (-1) are undefined."""

    def of(self, rows: Any, /) -> "PairScores":
        """Return the same labels with other `rows`."""


@dataclass(frozen=True, eq=False)
class Scorers:
    """Scorers in addition to the classifier: E(z) [n, D] of this rank's labels, a memory, and a linear ranker."""

    texts: Any = None
    memory: Memory | None = None
    linear: LinearRanker | None = None

    def score(
        self,
        x: Any,
        inputs: Inputs | None,
        labels: PairScores,
        shortlisted: tuple[np.ndarray, np.ndarray],
        filters: Ragged,
        candidates: np.ndarray | None = None,
    ) -> ShortlistScores:
        """Score a shortlist, `shortlisted` (scores and ids [B, S]), and labels of `candidates` that other scorers add.

        `inputs`: the inputs that x was computed from, which a linear ranker needs. All ranks have the same queries and
        return the same results; each rank scores its own labels.
        """
        scores, ids = shortlisted
        votes = None if self.memory is None else self.memory.votes(x)
        ranked = None
        if self.linear is not None:
            assert inputs is not None, "a linear ranker needs the rows that x was embedded from"
            ranked = self.linear.votes(inputs, ADDED_LABELS)
        found = [rows.best(ADDED_LABELS)[1] for rows in (votes, ranked) if rows is not None]
        if found:
            both = np.concatenate([ids, *found], 1)
            listed, more = (part[:, ids.shape[1] :] for part in (is_repeated(both), both))
            listed = listed | filters.contains(more)
            more = np.where(listed if candidates is None else listed | ~np.isin(more, candidates), PAD, more)
            ids, scores = np.concatenate([ids, more], 1), np.concatenate([scores, labels.score(x, more)], 1)
        none = np.zeros(ids.shape, np.float32)
        texts = none if self.texts is None else labels.of(self.texts).score(x, ids)
        other_scores = (none if rows is None else votes_of(rows, ids) for rows in (votes, ranked))
        return ShortlistScores(ids, np.where(ids == PAD, 0, scores), texts, *other_scores)

    def score_listed(
        self, x: Any, inputs: Inputs | None, labels: PairScores, listed: tuple[np.ndarray, np.ndarray]
    ) -> ShortlistScores:
        """Score only the labels in `listed`, which has the same format as `shortlisted` in `score`."""
        scored = self.score(x, inputs, labels, listed, Ragged.empty(len(x)), np.empty(0, np.int64))
        return ShortlistScores(*(column[:, : listed[1].shape[1]] for column in scored))


FORMAT = 1
_LEAST = 1e-3  # minimum weight of the classifier, so that the classifier orders labels that are otherwise equal
_GAIN = 1.002  # a scorer is left out if the loss without the scorer is at most this multiple
_OTHER_SCORERS = ("votes", "texts", "linear")  # in the order in which scorers are left out, the most expensive first


@dataclass(frozen=True)
class FusionWeights(Fusion):
    """s + `texts` t + `votes` v + `linear` l, where s is the score / `unit`, or with `logistic` the score's sigmoid."""

    texts: float = 0.0
    votes: float = 0.0
    unit: float = 1.0
    logistic: bool = False
    linear: float = 0.0

    @classmethod
    def fit(cls, scored: ShortlistScores, relevant: Ragged) -> "FusionWeights":
        """Find the maximum-likelihood weights on validation queries; `relevant`: the correct labels of the queries.

        The likelihood of a correct label is the softmax over this label and all incorrect labels, as in the decoupled
        softmax (DEXML, equation 5). A second term, with the same weight, is the softmax probability of all correct
        labels of a query together, because P@1 needs only one correct label. A few dozen queries suffice for this
        likelihood; ranking metrics would be too noisy.
        """
        unit = float(np.std(scored.scores[scored.ids != PAD])) or 1.0
        others = (getattr(scored, name) for name in _OTHER_SCORERS)
        columns = np.stack([scored.scores / unit, *others]).astype(np.float64)
        right, listed = relevant.contains(scored.ids), scored.ids != PAD
        kept = np.abs(columns).sum((1, 2)) > 0
        kept[0] = True
        best, weights = _minimize(columns, right, listed, kept)
        for place in range(1, len(kept)):
            fewer = kept & (np.arange(len(kept)) != place)
            loss, without = _minimize(columns, right, listed, fewer)
            if loss <= _GAIN * best:
                kept, weights = fewer, without
        other_weights = dict(zip(_OTHER_SCORERS, weights[1:].tolist(), strict=True))
        return cls(unit=unit / float(weights[0]), **other_weights)

    @property
    def reads_texts(self) -> bool:
        return self.texts > 0

    def parts(self, scored: ShortlistScores, frequency: Any = None) -> dict[str, np.ndarray]:
        scores = scored.scores.astype(np.float64)
        return {
            "vector": 1 / (1 + np.exp(-scores)) if self.logistic else scores / self.unit,
            "text": self.texts * scored.texts,
            "points": self.votes * scored.votes,
            "words": self.linear * scored.linear,
        }

    def to_json(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    @classmethod
    def parse(cls, data: bytes, place: str) -> "FusionWeights":
        """Parse the weights from the content of a file at `place`. Raises TableError for an invalid file."""
        try:
            body = json.loads(data)
            if body.pop("format") != FORMAT:
                raise ValueError("the format belongs to another version")
            weights = cls(**body)
            numbers = np.array([weights.unit, weights.texts, weights.votes, weights.linear], float)
            if not np.isfinite(numbers).all() or numbers[0] <= 0:
                raise ValueError(f"weights {numbers.tolist()}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TableError(f"{place}: not a file of fusion weights: {error}. Fit the fusion again.") from None
        return weights


def _minimize(columns: np.ndarray, right: np.ndarray, listed: np.ndarray, kept: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the minimum loss of correct labels, and the weights [4], with only the `kept` columns of [4, B, S]."""
    from scipy.optimize import minimize
    from scipy.special import expit, logsumexp

    used = columns[kept]
    query, place = np.nonzero(right)
    wrong, some = listed & ~right, right.any(axis=1)

    def softmax(scores: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log sum exp(score) over labels in the `mask` [B, S] (-inf without labels), and the gradient [C, B]."""
        masked = np.where(mask, scores, -np.inf)
        total = logsumexp(masked, axis=1)
        share = np.where(mask, np.exp(masked - np.where(np.isfinite(total), total, 0)[:, None]), 0)
        return total, np.einsum("cbs,bs->cb", used, share)

    def loss_of(weights: np.ndarray) -> tuple[float, np.ndarray]:
        scores = np.tensordot(weights, used, 1)
        (others, of_others), (any_right, of_right) = softmax(scores, wrong), softmax(scores, right)
        behind, first = others[query] - scores[query, place], (others - any_right)[some]
        slope = (of_others[:, query] - used[:, query, place]) @ expit(behind) / max(1, len(query))
        slope += (of_others - of_right)[:, some] @ expit(first) / max(1, len(first))
        loss = np.logaddexp(0, behind).sum() / max(1, len(query)) + np.logaddexp(0, first).sum() / max(1, len(first))
        return float(loss), slope

    bounds = [(_LEAST, None), *[(0.0, None)] * (len(used) - 1)]
    found = minimize(loss_of, np.ones(len(used)), jac=True, bounds=bounds)
    weights = np.zeros(len(columns))
    weights[kept] = found.x
    return float(found.fun), weights


def fusion_file(fusion: Fusion) -> tuple[str, bytes]:
    """Return the name and the content of the file of a fusion in a run."""
    if isinstance(fusion, FusionWeights | FusionTree):
        return "weights.json" if isinstance(fusion, FusionWeights) else "tree.json", fusion.to_json()
    body = {"score": name_of(type(fusion)), "content": fusion.to_json().decode()}
    return "score.json", json.dumps(body).encode()


def parse_fusion(data: bytes, place: str) -> Fusion:
    """Parse the content of a file at `place`, whose name says what it contains.

    Raises TableError, and InputError for a score of a module that nobody has named.
    """
    if not place.endswith("score.json"):
        return (FusionWeights if place.endswith("weights.json") else FusionTree).parse(data, place)
    try:
        name, content = (str(json.loads(data)[key]) for key in ("score", "content"))
    except (ValueError, KeyError, TypeError) as error:
        raise TableError(f"{place}: not a file of a score: {error!r}. Fit the fusion again.") from None
    return find_named(name, place).parse(content.encode(), place)


@dataclass(frozen=True, eq=False)
class Reranker:
    """Reranks a `shortlist` by fused scores; `frequency` [L]: number of training points of each label."""

    fusion: Fusion
    scorers: Scorers
    frequency: np.ndarray
    shortlist: int

    def rank(
        self,
        x: Any,
        labels: PairScores,
        shortlisted: tuple[np.ndarray, np.ndarray],
        k: int,
        filters: Ragged,
        candidates: np.ndarray | None = None,
        inputs: Inputs | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores float32 [B, k], ids int64 [B, k]) of the best fused scores, best first; -inf and -1 pad.

        `shortlisted`: scores and ids [B, S] of `labels` for x [B, D or more]; labels with equal scores stay in the same
        order. `candidates` [C]: the only labels that scorers may add; None: all. `inputs`: the inputs that x was
        computed from.
        """
        scored = self.scorers.score(x, inputs, labels, shortlisted, filters, candidates)
        fused = self.fusion.fuse(scored, self.frequency[scored.ids])
        fused = np.where(scored.ids == PAD, -np.inf, fused)
        order = np.argsort(-fused, axis=1, kind="stable")[:, :k]
        best, ids = take_per_row(fused, order), take_per_row(scored.ids, order)
        return pad_columns(best, k, -np.inf).astype(np.float32), pad_columns(ids, k, PAD)

    def scores(
        self, x: Any, labels: PairScores, listed: tuple[np.ndarray, np.ndarray], inputs: Inputs | None = None
    ) -> np.ndarray:
        """Return the fused scores float32 [B, S] of only the labels in `listed` (same format as `shortlisted`)."""
        scored = self.scorers.score_listed(x, inputs, labels, listed)
        return self.fusion.fuse(scored, self.frequency[scored.ids]).astype(np.float32)
