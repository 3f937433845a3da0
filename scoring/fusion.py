"""Fused scores: scores of a shortlist, weights, boosted trees, NGAME's stored tree, and scores from outside."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from schemas import PAD
from schemas.errors import TableError
from schemas.ragged import Ragged, SparseRows, is_repeated, offsets_of, pad_columns, take_per_row
from schemas.table import Table
from scoring.linear import LinearRanker
from scoring.memory import Memory, votes_of
from scoring.names import Names
from scoring.neighbours import Neighbours
from scoring.trees import LARGE, MANY, SMALL, Trees
from scoring.words import hash_texts
from trainer.inputs import Inputs
from trainer.modules import find_named, name_of


@dataclass(frozen=True, eq=False)
class ShortlistScores:
    """Scores of S labels per query: `ids` [B, S] int64, padded with -1.

    `near` [B, S] bool: the labels that a search found for the query, with which ranks are counted; the other labels are
    only scored, because somebody asked for them. `by`: the scores [B, S] by name, as in an `Explanation`; 0 where a
    scorer did not find the label, NaN where a label has nothing to score.
    """

    ids: np.ndarray
    near: np.ndarray
    by: Mapping[str, np.ndarray]

    def rows(self, some: slice | np.ndarray) -> "ShortlistScores":
        """Return the scores of `some` queries."""
        return ShortlistScores(self.ids[some], self.near[some], {name: each[some] for name, each in self.by.items()})


class Fusion(ABC):
    """A score made of the scores in a shortlist."""

    @property
    def reads_texts(self) -> bool:
        """Whether it uses the scores of labels' texts."""
        return True

    @abstractmethod
    def parts(self, scored: ShortlistScores, frequency: Any) -> dict[str, np.ndarray]:
        """Return the terms of the fused scores by name, [B, S] each, for labels with `frequency` [B, S]."""

    def fuse(self, scored: ShortlistScores, frequency: Any = None, texts: np.ndarray | None = None) -> np.ndarray:
        """Return the fused scores [B, S], the sum of all `parts`.

        `texts` [B]: hashes of the texts, if these are rows that the fusion was fitted on: then no score comes from a
        fit to its own row.
        """
        return sum(self.parts(scored, frequency).values(), np.float64(0))  # type: ignore[arg-type]

    def tie_breaks(self, scored: ShortlistScores) -> np.ndarray:
        """Return scores [B, S] that order labels with equal fused scores."""
        return scored.by["vector"]

    def exported(self) -> "Fusion":
        """Return what an export needs of it."""
        return self

    @abstractmethod
    def to_json(self) -> bytes:
        """Return the content of a file, which `parse` reads."""

    @classmethod
    @abstractmethod
    def parse(cls, data: bytes, place: str) -> "Fusion":
        """Read the content of a file at `place`. Raises TableError for an invalid file."""


@dataclass(frozen=True, eq=False)
class FusionTree(Fusion):
    """T(d) for d = (E(z).x, w.x, f): the value of a single `tree`, to which both scores are added.

    `units` [2]: divisors of both scores in the sum. Descriptors are float32, as in scikit-learn's comparisons.
    """

    tree: Trees
    units: np.ndarray

    def predict(self, label_scores: np.ndarray, scores: np.ndarray, frequency: np.ndarray) -> np.ndarray:
        """Return T(d) as float64 of the arrays' common shape."""
        described = np.stack(np.broadcast_arrays(label_scores, scores, frequency), axis=-1).astype(np.float32)
        return self.tree.walk(described.reshape(-1, 3)).reshape(described.shape[:-1])

    def parts(self, scored: ShortlistScores, frequency: np.ndarray) -> dict[str, np.ndarray]:
        """Return E(z).x and w.x, divided by `units`, and T(d)."""
        text, vector = scored.by["text"], scored.by["vector"]
        tree = self.predict(text, vector, frequency)
        return {"text": text / self.units[0], "vector": vector / self.units[1], "tree": tree}

    def to_json(self) -> bytes:
        return json.dumps({"tree": self.tree.as_json(), "units": self.units.tolist()}).encode()

    @classmethod
    def parse(cls, data: bytes, place: str) -> "FusionTree":
        """Parse the tree from the content of a file at `place`. Raises TableError for an invalid file."""
        try:
            body = json.loads(data)
            tree, units = Trees.from_json(body["tree"], most_leaves=len(data)), np.array(body["units"], np.float64)
            if len(tree.columns) != 3 or units.shape != (2,) or not (units > 0).all():
                raise ValueError("units, or the number of columns")
        except (ValueError, KeyError, TypeError) as error:
            raise TableError(f"{place}: not a fusion tree: {error}. Fit the fusion again.") from None
        return cls(tree, units)


# Maximum number of labels that a scorer adds to the shortlist.
ADDED_LABELS = {"points": 100, "words": 100, "neighbours": 40, "name": 25}


class PairScores(Protocol):
    """Label rows of an export or of a rank, as an array or a tensor, that score x [B, D or more]."""

    def score(self, x: Any, ids: np.ndarray, /) -> np.ndarray:
        """Multiply the rows of labels `ids` int64 [B, S] by x: float32 [B, S]; scores of padding (-1) are undefined."""

    def of(self, rows: Any, /) -> "PairScores":
        """Return the same labels with other `rows`."""


@dataclass(frozen=True, eq=False)
class Scorers:
    """Scorers in addition to the classifier: E(z) [n, D] of this rank's labels; a memory, a linear ranker, and others.

    `trained_only`: the queries may be rows that the run held out, which do not vote for themselves.
    """

    texts: Any = None
    memory: Memory | None = None
    linear: LinearRanker | None = None
    neighbours: Neighbours | None = None
    names: Names | None = None
    trained_only: bool = False

    @classmethod
    def read(cls, table: Table, texts: Any, memory: Memory | None) -> "Scorers":
        """Read the scorers of words in `table`, a fusion or an export. Raises TableError."""
        return cls(texts, memory, LinearRanker.read(table), Neighbours.read(table), Names.read(table))

    @property
    def of_words(self) -> list[LinearRanker | Neighbours | Names]:
        """The scorers that read words."""
        return [scorer for scorer in (self.linear, self.neighbours, self.names) if scorer is not None]

    def score(
        self,
        x: Any,
        inputs: Inputs | None,
        labels: PairScores,
        shortlisted: tuple[np.ndarray, np.ndarray],
        listed: np.ndarray,
    ) -> ShortlistScores:
        """Score a shortlist, `shortlisted` (scores and ids [B, S]), labels that scorers add, and labels `listed`.

        `inputs`: the inputs that x was computed from, which scorers of words need. All ranks have the same queries and
        return the same results; each rank scores its own labels.
        """
        scores, ids = shortlisted
        found = {} if self.memory is None else {"points": self.memory.votes(x)}
        if self.of_words:
            assert inputs is not None, "scorers of words need the rows that x was embedded from"
            if self.linear is not None:
                found["words"] = self.linear.votes(inputs, ADDED_LABELS["words"])
            if self.neighbours is not None:
                found["neighbours"] = self.neighbours.votes(inputs, self.trained_only)
        added = [rows.best(ADDED_LABELS[name])[1] for name, rows in found.items()]
        if self.names is not None and inputs is not None and inputs.tokens is not None:
            added.append(self.names.candidates(inputs.tokens, ADDED_LABELS["name"])[1])
        both = np.concatenate([ids, *added, listed], 1)
        both[is_repeated(both)] = PAD
        used = (both != PAD).any(0)
        used[: ids.shape[1]] = True
        near = (np.arange(both.shape[1]) < both.shape[1] - listed.shape[1])[used] & (both[:, used] != PAD)
        both = both[:, used]
        vector = np.concatenate([scores, labels.score(x, both[:, ids.shape[1] :])], 1)
        by = {"vector": np.where(both == PAD, 0, vector)}
        if self.texts is not None:
            by["text"] = labels.of(self.texts).score(x, both)
        by |= {name: votes_of(rows, both) for name, rows in found.items()}
        if self.names is not None and inputs is not None and inputs.tokens is not None:
            by |= self.names.columns(inputs, both, found)
        return ShortlistScores(both, near, by)


FORMAT = 1
_LEAST = 1e-3  # minimum weight of the classifier, so that the classifier orders labels that are otherwise equal
_GAIN = 1.002  # a scorer is left out if the loss without the scorer is at most this multiple
_OTHER_SCORERS = {"votes": "points", "texts": "text", "linear": "words"}  # left out in this order, as they cost


@dataclass(frozen=True)
class FusionWeights(Fusion):
    """w.x / `unit` + `texts` t + `votes` v + `linear` l."""

    texts: float = 0.0
    votes: float = 0.0
    unit: float = 1.0
    linear: float = 0.0

    @classmethod
    def fit(cls, scored: ShortlistScores, right: np.ndarray) -> "FusionWeights":
        """Find the maximum-likelihood weights on validation queries; `right` [B, S] bool: which labels are correct.

        The likelihood of a correct label is the softmax over this label and all incorrect labels, as in the decoupled
        softmax (DEXML, equation 5). A second term, with the same weight, is the softmax probability of all correct
        labels of a query together, because P@1 needs only one correct label. A few dozen queries suffice for this
        likelihood; ranking metrics would be too noisy.
        """
        vector, listed = scored.by["vector"], scored.ids != PAD
        unit = float(np.std(vector[listed])) or 1.0
        others = (scored.by.get(name, 0 * vector) for name in _OTHER_SCORERS.values())
        columns = np.stack([vector / unit, *others]).astype(np.float64)
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
        vector = scored.by["vector"].astype(np.float64)
        others = {name: getattr(self, weight) for weight, name in _OTHER_SCORERS.items() if name in scored.by}
        return {
            "vector": vector / self.unit,
            **{name: weight * scored.by[name] for name, weight in others.items()},
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


RANKED = ("vector", "text", "points", "words", "neighbours", "weights")  # scores whose rank and gap are columns, too
FOLDS = 3
_ROWS = 256  # queries whose columns are in memory at a time


@dataclass(frozen=True, eq=False)
class FusionTrees(Fusion):
    """Log odds of boosted trees on the scores of a label, their ranks and gaps, and the label's training points.

    `weights` add one more score. `folds`: trees that were fitted without a part of the rows, to score these rows.
    """

    weights: FusionWeights
    trees: Trees
    folds: tuple[Trees, ...] = ()

    @classmethod
    def fit(
        cls,
        weights: FusionWeights,
        scored: ShortlistScores,
        right: np.ndarray,
        frequency: np.ndarray,
        texts: np.ndarray,
    ) -> "FusionTrees":
        """Fit to queries with hashes `texts` [B] of their texts; `right` [B, S] bool: which labels are correct.

        Equal texts are in one fold. Raises InputError unless `can_fit`.
        """
        names, x = _columns(weights, scored, frequency)
        listed, fold = scored.ids != PAD, texts % np.uint64(FOLDS)
        size = LARGE if np.count_nonzero(right) >= MANY else SMALL

        def fit(left_out: int) -> Trees:
            kept = listed & (fold != left_out)[:, None]
            return Trees.fit(names, x[kept], right[kept], size)

        return cls(weights, fit(FOLDS), tuple(map(fit, range(FOLDS))))  # no row is in the fold FOLDS

    @property
    def reads_texts(self) -> bool:
        return "text" in self.trees.columns

    @staticmethod
    def can_fit(scored: ShortlistScores, right: np.ndarray, texts: np.ndarray) -> bool:
        """Return whether the rows outside of each fold have correct and incorrect labels, as `fit` needs."""
        fold, wrong = texts % np.uint64(FOLDS), (scored.ids != PAD) & ~right
        return all(labels[fold != number].any() for labels in (right, wrong) for number in range(FOLDS))

    def fuse(self, scored: ShortlistScores, frequency: Any = None, texts: np.ndarray | None = None) -> np.ndarray:
        fused = np.zeros(scored.ids.shape)
        for start in range(0, len(fused), _ROWS):
            some = slice(start, start + _ROWS)
            listed = scored.ids[some] != PAD
            _, x = _columns(self.weights, scored.rows(some), frequency[some], self.trees.columns)
            if texts is None or not self.folds:
                fused[some][listed] = self.trees(x[listed])
                continue
            for fold, trees in enumerate(self.folds):
                own = listed & (texts[some] % np.uint64(len(self.folds)) == fold)[:, None]
                fused[some][own] = trees(x[own])
        return fused

    def tie_breaks(self, scored: ShortlistScores) -> np.ndarray:
        return self.weights.fuse(scored)

    def exported(self) -> "FusionTrees":
        return replace(self, folds=())

    def parts(self, scored: ShortlistScores, frequency: Any) -> dict[str, np.ndarray]:
        """Return what each score adds by its value, its rank and its gap."""
        names, x = _columns(self.weights, scored, frequency, self.trees.columns)
        added = self.trees.contributions(x.reshape(-1, len(names))).reshape(*x.shape[:2], -1)
        parts: dict[str, np.ndarray] = {"bias": added[..., -1]}
        for place, name in enumerate(names):
            score = name.removesuffix(RANK).removesuffix(GAP)
            parts[score] = parts.get(score, 0) + added[..., place]
        return parts

    def to_json(self) -> bytes:
        trees = [each.as_json() for each in (self.trees, *self.folds)]
        return json.dumps({"weights": json.loads(self.weights.to_json()), "trees": trees}).encode()

    @classmethod
    def parse(cls, data: bytes, place: str) -> "FusionTrees":
        """Parse the trees from the content of a file at `place`. Raises TableError for an invalid file."""
        try:
            body = json.loads(data)
            weights = FusionWeights.parse(json.dumps(body["weights"]).encode(), place)
            trees, *folds = map(Trees.from_json, body["trees"])
        except (ValueError, KeyError, TypeError) as error:
            raise TableError(f"{place}: not a file of boosted trees: {error}. Fit the fusion again.") from None
        return cls(weights, trees, tuple(folds))


RANK, GAP = " rank", " gap"


def _columns(
    weights: FusionWeights, scored: ShortlistScores, frequency: np.ndarray, names: Sequence[str] | None = None
) -> tuple[Sequence[str], np.ndarray]:
    """Return the names of the columns and the columns float64 [B, S, C] of labels.

    `names`: only these; a column that the rows do not have is NaN.
    """
    scores = {**scored.by, "weights": weights.fuse(scored)}
    columns: dict[str, np.ndarray] = {"training points": frequency, **scores}
    for name in (name for name in RANKED if name in scores):
        best = np.where(scored.near, scores[name], -np.inf).max(1, keepdims=True, initial=-np.inf)
        columns[name + RANK] = _ranks(scores[name], scored.near)
        columns[name + GAP] = scores[name] - np.where(np.isfinite(best), best, 0)
    names, absent = [*columns] if names is None else names, np.full(scored.ids.shape, np.nan)
    return names, np.stack([np.asarray(columns.get(name, absent), np.float64) for name in names], -1)


def _ranks(scores: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Return how many `near` labels [B, S] of the query score more than each label, int64 [B, S]."""
    order = np.argsort(-scores, axis=1, kind="stable")
    ranked, counted = take_per_row(scores, order), take_per_row(near, order)
    before = np.cumsum(counted, axis=1) - counted
    first = np.ones(ranked.shape, bool)
    first[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
    ranks = np.empty_like(order)
    start = np.maximum.accumulate(np.where(first, np.arange(ranked.shape[1]), 0), axis=1)
    np.put_along_axis(ranks, order, take_per_row(before, start), 1)
    return ranks


def fusion_file(fusion: Fusion) -> tuple[str, bytes]:
    """Return the name and the content of the file of a fusion in a run."""
    name = next((name for name, kind in FILES.items() if type(fusion) is kind), None)
    if name is not None:
        return name, fusion.to_json()
    body = {"score": name_of(type(fusion)), "content": fusion.to_json().decode()}
    return OWN_SCORE, json.dumps(body).encode()


# Files of a fusion in a run, by class; a score from outside names its class.
FILES: Mapping[str, type[Fusion]] = {"tree.json": FusionTree, "weights.json": FusionWeights, "trees.json": FusionTrees}
OWN_SCORE = "score.json"
EXPORTED_FILES = {name: f"fusion-{name}" for name in (*FILES, OWN_SCORE)}


def parse_fusion(data: bytes, place: str) -> Fusion:
    """Parse the content of a file at `place`, whose name says what it contains.

    Raises TableError, and InputError for a score of a module that nobody has named.
    """
    kind = FILES.get(place.rpartition("/")[2].removeprefix("fusion-"))
    if kind is not None:
        return kind.parse(data, place)
    try:
        name, content = (str(json.loads(data)[key]) for key in ("score", "content"))
    except (ValueError, KeyError, TypeError) as error:
        raise TableError(f"{place}: not a file of a score: {error!r}. Fit the fusion again.") from None
    return find_named(name, place).parse(content.encode(), place)


Search = Callable[[int, Ragged, np.ndarray | None], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Reranker:
    """Reranks a `shortlist` by fused scores; `frequency` [L]: number of training points of each label.

    The score of a label depends on the query alone, not on the labels that are left out. `held_out`: the queries are
    rows that the fusion was fitted on.
    """

    fusion: Fusion
    scorers: Scorers
    frequency: np.ndarray
    shortlist: int
    held_out: bool = False

    def rank(
        self,
        x: Any,
        labels: PairScores,
        search: Search,
        k: int,
        filters: Ragged,
        candidates: np.ndarray | None = None,
        inputs: Inputs | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores float32 [B, k], ids int64 [B, k]) of the best fused scores, best first; -inf and -1 pad.

        `search`: width, filters and candidates -> scores and ids [B, width] of `labels` for x [B, D or more].
        `candidates` [C]: the only labels in the answer; None: all. `inputs`: the inputs that x was computed from.
        """
        near = search(self.shortlist, Ragged.empty(len(x)), None)
        is_whole = candidates is None and not filters.longest and k <= self.shortlist
        _, listed = near if is_whole else search(max(k, self.shortlist), filters, candidates)
        scored, fused = self._fuse(x, labels, near, listed, inputs)
        left_out = (scored.ids == PAD) | filters.contains(scored.ids)
        if candidates is not None:
            left_out |= ~np.isin(scored.ids, candidates)
        fused = np.where(left_out, -np.inf, fused)
        order = np.lexsort((scored.ids, -self.fusion.tie_breaks(scored), -fused), axis=1)[:, :k]
        best, ids = take_per_row(fused, order), take_per_row(np.where(left_out, PAD, scored.ids), order)
        return pad_columns(best, k, -np.inf).astype(np.float32), pad_columns(ids, k, PAD)

    def scores(
        self, x: Any, labels: PairScores, search: Search, listed: np.ndarray, inputs: Inputs | None = None
    ) -> np.ndarray:
        """Return the fused scores float32 [B, S] of labels `listed` [B, S], 0 for padding; arguments as in `rank`."""
        near = search(self.shortlist, Ragged.empty(len(x)), None)
        scored, fused = self._fuse(x, labels, near, listed, inputs)
        order = np.argsort(scored.ids, axis=1)
        ids, fused = take_per_row(scored.ids, order), take_per_row(fused, order)
        rows = SparseRows(ids[ids != PAD], fused[ids != PAD].astype(np.float32), offsets_of((ids != PAD).sum(1)))
        return votes_of(rows, listed)

    def parts(
        self, x: Any, labels: PairScores, search: Search, label: int, inputs: Inputs | None = None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the terms of a label's fused score for one query, and the scores by name; arguments as in `rank`."""
        near = search(self.shortlist, Ragged.empty(len(x)), None)
        scored = self.scorers.score(x, inputs, labels, near, np.array([[label]]))
        place = (0, int(np.flatnonzero(scored.ids[0] == label)[0]))
        parts = self.fusion.parts(scored, self.frequency[scored.ids])
        terms, scores = ({name: float(each[place]) for name, each in some.items()} for some in (parts, scored.by))
        return terms, scores

    def _fuse(
        self,
        x: Any,
        labels: PairScores,
        near: tuple[np.ndarray, np.ndarray],
        listed: np.ndarray,
        inputs: Inputs | None,
    ) -> tuple[ShortlistScores, np.ndarray]:
        scored = self.scorers.score(x, inputs, labels, near, listed)
        texts = hash_texts(inputs) if self.held_out and inputs is not None else None
        return scored, self.fusion.fuse(scored, self.frequency[scored.ids], texts)
