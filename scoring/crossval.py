"""Every training row is scored by a ranker that has not seen it; then each of its labels is compared with chance.

A label that was put on a row by mistake has no more evidence for it than a label drawn at random, by frequency. The
evidence for a label of a row is what rows of other folds say: the ranker's score, the votes of the nearest texts, and
how often the label is given beside the row's other labels.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from schemas import PAD
from schemas.errors import missing_extra
from schemas.ragged import Ragged, SparseRows
from schemas.randomness import Purpose, generator
from scoring.calibration import Calibration
from scoring.linear import LinearRanker, choose_title
from scoring.memory import NEIGHBOURS, count_votes
from scoring.neighbours import TEMPERATURE, Neighbours
from scoring.words import Points, best_labels, join_points

DEPTH = 100  # best labels of a row whose scores are kept
FEWEST = 5  # points of a label in other folds, below which a row of the label cannot be judged
_SMOOTHING = 5  # rows by which a label beside another is taken to be as frequent as elsewhere
_LIKE_ALL = 3  # points by which a label is taken to be as easy as the mean label
_BESIDE = 32  # labels of a row that count as beside a label
_LEARNED_FROM = 50_000  # pairs to learn from how evidence differs from chance


def folds_of(groups: np.ndarray, folds: int) -> np.ndarray:
    """Return the fold in [0, `folds`) of rows with the hashes `groups` uint64 [N]: int64 [N]."""
    return ((groups >> np.uint64(32)).astype(np.int64) * folds) >> 32


def points_elsewhere(labels: Ragged, fold: np.ndarray, count: int) -> np.ndarray:
    """Return how many points each of `count` labels has outside each fold, int64 [folds, L]; `fold` [N]."""
    folds = int(fold.max(initial=0)) + 1
    inside = np.bincount(fold[labels.row_of()] * count + labels.entries, minlength=folds * count)
    return inside.reshape(folds, count).sum(0) - inside.reshape(folds, count)  # type: ignore[no-any-return]


class Scored(NamedTuple):
    """B rows: `scores` and `ids` [B, K] of the best labels; `similarity` and numbers [B, M] of the `nearest` rows.

    All by rows of other folds; ids and numbers are padded with -1.
    """

    scores: np.ndarray
    ids: np.ndarray
    similarity: np.ndarray
    nearest: np.ndarray


@dataclass(frozen=True, eq=False)
class Rows:
    """N training rows: counted words with and without pairs, labels below `count`, and folds [N].

    `texts`: the words of the labels' own texts, which a ranker learns as well; None: labels have none.
    """

    pairs: SparseRows
    words: SparseRows
    labels: Ragged
    fold: np.ndarray
    count: int
    vocabulary: int
    texts: Points | None

    def score(self, number: int) -> Scored:
        """Score the rows of a fold by the other rows: by a linear ranker, and by the nearest texts."""
        inside = self.fold == number
        own, others = np.flatnonzero(inside), np.flatnonzero(~inside)
        points = Points(self.pairs.take(others), self.labels.take(others))
        title = choose_title(points, self.count, self.vocabulary)
        every = join_points([points, *([self.texts] if self.texts else [])])
        ranker = LinearRanker.fit(every, self.count, self.vocabulary, len(others), title=title)
        assert ranker is not None, "no limit of time"
        best = best_labels(ranker.words.weigh(self.pairs.take(own)), ranker.weights, self.count, DEPTH)
        near = Neighbours.index(points._replace(rows=self.words.take(others)), len(others), self.vocabulary)
        similarity, found = best_labels(near.words.weigh(self.words.take(own)), near.texts, len(others), NEIGHBOURS)
        return Scored(*best, similarity, np.where(found == PAD, PAD, others[found]))


@dataclass(frozen=True, eq=False)
class Evidence:
    """What other folds say about labels of N rows: `scores` and `ids` [N, K], `votes`; the rows' `labels` and folds."""

    scores: np.ndarray
    ids: np.ndarray
    votes: SparseRows
    labels: Ragged
    fold: np.ndarray
    count: int

    @cached_property
    def _ranked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, columns = np.nonzero(self.ids != PAD)
        keys = rows * self.count + self.ids[rows, columns]
        order = np.argsort(keys)
        return keys[order], self.scores[rows, columns][order], columns[order] + 1

    def look_up(self, rows: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores and the ranks, from 1, of pairs [P]; 0 and 0 beyond a row's K labels."""
        keys, scores, ranks = self._ranked
        sought = rows * self.count + labels
        return _look_up(keys, scores, sought), _look_up(keys, ranks, sought)

    def support(self, seed: int = 0) -> np.ndarray:
        """Return the log-odds that a given label is given for a reason, not drawn at random by frequency: [pairs].

        For each fold, a logistic regression is fitted on the other folds: their given labels, against random labels in
        the place of given ones. Raises InputError if scikit-learn is missing.
        """
        try:
            from sklearn.linear_model import LogisticRegression
            from sklearn.pipeline import make_pipeline
            from sklearn.preprocessing import SplineTransformer, StandardScaler
        except ImportError:
            raise missing_extra("suspects need scikit-learn", "trainer") from None
        rows, given = self.labels.row_of(), self.labels.entries.astype(np.int64)
        random = generator(seed, Purpose.LINEAR_RANKER, 1)
        drawn = given[random.integers(len(given), size=len(given))]
        mistaken = ~np.isin(rows * self.count + drawn, rows * self.count + given)
        real, chance = self.features(rows, given, given), self.features(rows, drawn, given)
        found, order = np.zeros(len(given)), random.permutation(len(given))
        for number in np.unique(self.fold).tolist():
            learned = order[self.fold[rows[order]] != number][:_LEARNED_FROM]
            against = learned[mistaken[learned]]
            features, own = np.concatenate([real[learned], chance[against]]), self.fold[rows] == number
            model = make_pipeline(
                StandardScaler(),
                SplineTransformer(5, degree=1, knots="quantile", extrapolation="constant"),
                LogisticRegression(max_iter=200),
            )
            model.fit(features, np.arange(len(features)) < len(learned))
            found[own] = model.decision_function(real[own])
        return found

    def features(self, rows: np.ndarray, labels: np.ndarray, replaced: np.ndarray) -> np.ndarray:
        """Describe the evidence for pairs (row, label) [P], where `labels` stand in the place of `replaced`: [P, F]."""
        fold, counts = self.fold[rows], self.labels.counts[rows]
        score, rank = self.look_up(rows, labels)
        voted = self.votes.row_of() * self.count + self.votes.ids
        edge = self.scores[rows, np.minimum(counts, self.scores.shape[1] - 1)]  # best of those that cannot all be given
        points = points_elsewhere(self.labels, self.fold, self.count)
        own, given = self.labels.row_of(), self.labels.entries
        sums, scores = np.zeros(points.shape), self.look_up(own, given)[0]
        np.add.at(sums, (self.fold[own], given), scores)
        easy = (sums.sum(0) - sums + _LIKE_ALL * scores.mean()) / (points + _LIKE_ALL)
        columns = [
            score,
            score - edge,
            np.where(rank, rank, self.scores.shape[1] + 1),
            _look_up(voted, self.votes.values, rows * self.count + labels),
            *self._beside(rows, labels, replaced, points),
            easy[fold, labels],
            np.log(np.maximum(points[fold, labels], 0.5)),
            np.log(counts),
        ]
        return np.column_stack(columns)

    def _beside(
        self, rows: np.ndarray, labels: np.ndarray, replaced: np.ndarray, points: np.ndarray
    ) -> list[np.ndarray]:
        """Return the largest, the mean and the sum of the log-lifts of labels [P] beside the row's other labels."""
        place = np.arange(len(self.labels.entries)) - self.labels.offsets[self.labels.row_of()]
        within = self.labels.keep(place < _BESIDE)
        owner = within.row_of()
        pairs = within.take(owner)
        left, right = within.entries.repeat(pairs.counts).astype(np.int64), pairs.entries
        keys, fold_of = left * self.count + right, self.fold[owner].repeat(pairs.counts)
        result = np.zeros((3, len(rows)))
        for number in range(len(points)):
            some = np.flatnonzero(self.fold[rows] == number)
            seen, together = np.unique(keys[fold_of != number], return_counts=True)
            others = within.take(rows[some])
            pair, other = others.row_of(), others.entries.astype(np.int64)
            kept = (other != replaced[some][pair]) & (other != labels[some][pair])
            pair, other = pair[kept], other[kept]
            label = labels[some][pair]
            usual = np.maximum(points[number][label], 0.5) / max(1, int((self.fold != number).sum()))
            both = _look_up(seen, together, other * self.count + label)
            lift = np.log((both + _SMOOTHING * usual) / ((points[number][other] + _SMOOTHING) * usual))
            sums, counts = np.bincount(pair, lift, len(some)), np.bincount(pair, minlength=len(some))
            largest = np.full(len(some), -np.inf)
            np.maximum.at(largest, pair, lift)
            result[:, some] = np.where(counts, largest, 0), sums / np.maximum(counts, 1), sums
        return [*result]


class Judged(NamedTuple):
    """The `probabilities` [N, K] of the ranked labels; the other fields [V] are of all rows' given labels, end to end.

    `probability`; `rank`, from 1, or 0 beyond K; `support`, log-odds of being there for a reason; `known`: the label
    has at least FEWEST points in other folds, and can be judged.
    """

    probabilities: np.ndarray
    probability: np.ndarray
    rank: np.ndarray
    support: np.ndarray
    known: np.ndarray


def judge(rows: Rows, scored: Scored) -> Judged:
    """Calibrate the scores and weigh the given labels. Raises InputError without scikit-learn, as `Calibration.fit`."""
    votes = count_votes(scored.similarity, scored.nearest, rows.labels, TEMPERATURE)
    evidence = Evidence(scored.scores, scored.ids, votes, rows.labels, rows.fold, rows.count)
    row, given = rows.labels.row_of(), rows.labels.entries.astype(np.int64)
    probabilities, beyond = calibrate_across(scored, rows)
    rank = evidence.look_up(row, given)[1]
    probability = np.where(rank, probabilities[row, rank - 1], beyond[rows.fold[row]]).astype(np.float32)
    known = points_elsewhere(rows.labels, rows.fold, rows.count)[rows.fold[row], given] >= FEWEST
    return Judged(probabilities, probability, rank, evidence.support(), known)


def calibrate_across(scored: Scored, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities [N, K] by curves fitted to the other folds' rows, and those beyond K labels [folds].

    Raises InputError if scikit-learn is missing, or if other folds have no correct or no incorrect label.
    """
    hits, present = rows.labels.contains(scored.ids), scored.ids != PAD
    is_best, found, beyond = np.zeros_like(hits), np.zeros(hits.shape, np.float32), []
    is_best[:, 0] = True
    for number in range(int(rows.fold.max()) + 1):
        others, own = rows.fold != number, rows.fold == number
        some = present & others[:, None]
        curve = Calibration.fit(scored.scores[some], hits[some], is_best[some])
        found[own] = np.where(present[own], curve(scored.scores[own]), 0)
        missed = rows.labels.counts[others].sum() - hits[others].sum()
        unranked = others.sum() * rows.count - some.sum()
        beyond.append(min(float(missed / max(1, unranked)), float(curve.probabilities[0])))
    return found, np.array(beyond)


def _look_up(keys: np.ndarray, values: np.ndarray, sought: np.ndarray) -> np.ndarray:
    """Return the values [P] of `sought` keys; 0 for keys that are not among the ascending `keys`."""
    if not len(keys):
        return np.zeros(len(sought), values.dtype)
    place = np.minimum(np.searchsorted(keys, sought), len(keys) - 1)
    return np.where(keys[place] == sought, values[place], 0)
