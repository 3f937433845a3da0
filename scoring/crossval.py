"""Every training row is scored by a ranker that has not seen it; then each of its labels is compared with chance.

A label that was put on a row by mistake has no more evidence for it than a label drawn at random, by frequency. The
evidence for a label of a row is what rows of other folds say: the ranker's score, the votes of the nearest texts, and
how often the label is given beside the row's other labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from schemas import PAD
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

    `texts`: the words of the labels' own texts, which a ranker learns as well.
    """

    pairs: SparseRows
    words: SparseRows
    labels: Ragged
    fold: np.ndarray
    count: int
    vocabulary: int
    texts: Sequence[Points]

    @cached_property
    def points_elsewhere(self) -> np.ndarray:
        """How many points each label has outside each fold, int64 [folds, L]."""
        folds = int(self.fold.max(initial=0)) + 1
        place = self.fold[self.labels.row_of()] * self.count + self.labels.entries
        inside = np.bincount(place, minlength=folds * self.count).reshape(folds, self.count)
        return inside.sum(0) - inside  # type: ignore[no-any-return]

    def score(self, number: int, best: tuple[np.ndarray, np.ndarray] | None = None) -> Scored:
        """Score the rows of a fold by the other rows: by the nearest texts, and by a linear ranker.

        `best`: scores above 0 and ids [B, K] by another ranker instead, padded with 0 and -1.
        """
        own, others = np.flatnonzero(self.fold == number), np.flatnonzero(self.fold != number)
        points = Points(self.words.take(others), self.labels.take(others))
        near = Neighbours.index(points, len(others), self.vocabulary)
        similarity, found = best_labels(near.words.weigh(self.words.take(own)), near.texts, len(others), NEIGHBOURS)
        if best is None:
            points = points._replace(rows=self.pairs.take(others))
            title = choose_title(points, self.count, self.vocabulary)
            every = join_points([points, *self.texts])
            ranker = LinearRanker.fit(every, self.count, self.vocabulary, len(others), title=title)
            assert ranker is not None, "no limit of time"
            best = best_labels(ranker.words.weigh(self.pairs.take(own)), ranker.weights, self.count, DEPTH)
        return Scored(*best, similarity, np.where(found == PAD, PAD, others[found]))


@dataclass(frozen=True, eq=False)
class Evidence:
    """What other folds say about labels of `rows`: their scores, the votes of the nearest texts, labels beside them."""

    rows: Rows
    scored: Scored

    @cached_property
    def _ranked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, columns = np.nonzero(self.scored.ids != PAD)
        keys = rows * self.rows.count + self.scored.ids[rows, columns]
        order = np.argsort(keys)
        return keys[order], self.scored.scores[rows, columns][order], columns[order] + 1

    def look_up(self, rows: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores and the ranks, from 1, of pairs [P]; 0 and 0 beyond a row's K labels."""
        keys, *values = self._ranked
        scores, ranks = (_look_up(keys, each, rows * self.rows.count + labels) for each in values)
        return scores, ranks

    def support(self, seed: int = 0) -> np.ndarray:
        """Return the log-odds that a given label is given for a reason, not drawn at random by frequency: [pairs].

        For each fold, a logistic regression is fitted on the other folds: their given labels, against random labels in
        the place of given ones.
        """
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import SplineTransformer, StandardScaler

        rows, fold, given = self.rows.labels.row_of(), self.rows.fold, self.rows.labels.entries.astype(np.int64)
        random = generator(seed, Purpose.LINEAR_RANKER, 1)
        drawn = given[random.integers(len(given), size=len(given))]
        mistaken = ~np.isin(rows * self.rows.count + drawn, rows * self.rows.count + given)
        real, chance = np.split(self.features(np.tile(rows, 2), np.concatenate([given, drawn]), np.tile(given, 2)), 2)
        found, order = np.zeros(len(given)), random.permutation(len(given))
        for number in np.unique(fold).tolist():
            learned = order[fold[rows[order]] != number][:_LEARNED_FROM]
            against = learned[mistaken[learned]]
            features, own = np.concatenate([real[learned], chance[against]]), fold[rows] == number
            splines = SplineTransformer(5, degree=1, knots="quantile", extrapolation="constant")
            model = make_pipeline(StandardScaler(), splines, LogisticRegression(max_iter=200))
            model.fit(features, np.arange(len(features)) < len(learned))
            found[own] = model.decision_function(real[own])
        return found

    def features(self, rows: np.ndarray, labels: np.ndarray, replaced: np.ndarray) -> np.ndarray:
        """Describe the evidence for pairs (row, label) [P], where `labels` stand in the place of `replaced`: [P, F]."""
        points, given, scored = self.rows.points_elsewhere, self.rows.labels, self.scored
        fold, counts, depth = self.rows.fold[rows], given.counts[rows], scored.ids.shape[1]
        score, rank = self.look_up(rows, labels)
        edge = scored.scores[rows, np.minimum(counts, depth - 1)]  # best of those that cannot all be given
        votes = count_votes(scored.similarity, scored.nearest, given, TEMPERATURE)
        voted = votes.row_of() * self.rows.count + votes.ids
        owner, sums = given.row_of(), np.zeros(points.shape)
        of_given = self.look_up(owner, given.entries)[0]
        np.add.at(sums, (self.rows.fold[owner], given.entries), of_given)
        easy = (sums.sum(0) - sums + _LIKE_ALL * of_given.mean()) / (points + _LIKE_ALL)
        columns = [
            score,
            score - edge,
            np.where(rank, rank, depth + 1),
            _look_up(voted, votes.values, rows * self.rows.count + labels),
            *self._beside(rows, labels, replaced),
            easy[fold, labels],
            np.log(np.maximum(points[fold, labels], 0.5)),
            np.log(counts),
        ]
        return np.column_stack(columns)

    def _beside(self, rows: np.ndarray, labels: np.ndarray, replaced: np.ndarray) -> np.ndarray:
        """Return the largest, the mean and the sum [3, P] of the log-lifts of labels beside the row's other labels."""
        given, fold, points = self.rows.labels, self.rows.fold, self.rows.points_elsewhere
        within = given.keep(np.arange(len(given.entries)) - given.offsets[given.row_of()] < _BESIDE)
        owner = within.row_of()
        pairs = within.take(owner)
        keys = within.entries.repeat(pairs.counts).astype(np.int64) * self.rows.count + pairs.entries
        fold_of, result = fold[owner].repeat(pairs.counts), np.zeros((3, len(rows)))
        for number in range(len(points)):
            some = np.flatnonzero(fold[rows] == number)
            seen, together = np.unique(keys[fold_of != number], return_counts=True)
            others = within.take(rows[some])
            pair, other = others.row_of(), others.entries.astype(np.int64)
            kept = (other != replaced[some][pair]) & (other != labels[some][pair])
            pair, other = pair[kept], other[kept]
            label = labels[some][pair]
            usual = np.maximum(points[number][label], 0.5) / max(1, int((fold != number).sum()))
            both = _look_up(seen, together, other * self.rows.count + label)
            lift = np.log((both + _SMOOTHING * usual) / ((points[number][other] + _SMOOTHING) * usual))
            sums, counts = np.bincount(pair, lift, len(some)), np.bincount(pair, minlength=len(some))
            largest = np.full(len(some), -np.inf)
            np.maximum.at(largest, pair, lift)
            result[:, some] = np.where(counts, largest, 0), sums / np.maximum(counts, 1), sums
        return result


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
    """Calibrate the scores and weigh the given labels. Raises InputError as `calibrate_across`."""
    evidence, row, given = Evidence(rows, scored), rows.labels.row_of(), rows.labels.entries.astype(np.int64)
    probabilities, beyond = calibrate_across(scored, rows)
    rank = evidence.look_up(row, given)[1]
    probability = np.where(rank, probabilities[row, rank - 1], beyond[rows.fold[row]]).astype(np.float32)
    known = rows.points_elsewhere[rows.fold[row], given] >= FEWEST
    return Judged(probabilities, probability, rank, evidence.support(), known)


def calibrate_across(scored: Scored, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities [N, K] by curves fitted to the other folds' rows, and those beyond K labels [folds].

    Raises InputError if scikit-learn is missing, or if other folds have no correct or no incorrect label.
    """
    hits, present = rows.labels.contains(scored.ids), scored.ids != PAD
    found, beyond = np.zeros(hits.shape, np.float32), []
    for number in range(int(rows.fold.max()) + 1):
        own, others = rows.fold == number, rows.fold != number
        some = present & others[:, None]
        curve = Calibration.fit(scored.scores[some], hits[some], is_best=np.nonzero(some)[1] == 0)
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
