"""The linear ranker: one sparse vector per label over TF-IDF of words and word pairs, or over the data's features."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from schemas import PAD
from schemas.arrow import DENSE
from schemas.layout import DataLayout
from schemas.manifest import Shard
from schemas.mapped import MappedFile
from schemas.ragged import Ragged, SparseRows, offsets_of, take_per_row
from schemas.table import Table
from scoring.words import (
    BUDGET,
    ENTRY_BYTES,
    Points,
    RowFeatures,
    best_labels,
    count_features,
    join_points,
    open_vocabulary,
    read_points,
    reading_arrays,
    write_arrays,
)
from trainer.encoders.bag import PAIR_BUCKETS
from trainer.inputs import Inputs, open_queries, with_titles

if TYPE_CHECKING:
    from trainer.methods.sections import Data

FILE, TRAINED_FILE = "linear.safetensors", "linear-trained.safetensors"  # the second is fitted without held-out rows
_WEIGHTS = ("of_labels", "weights", "offsets")
_SMALLEST = 0.5  # weights below this, divided by the root of the mean number of words of a row, are dropped


@dataclass(frozen=True, eq=False)
class LinearRanker:
    """Scores labels [0, `labels`) for a row; `weights` lists the labels of each feature with their weights."""

    words: RowFeatures
    weights: SparseRows
    labels: int
    file: MappedFile | None = None  # the file that contains the weights

    @classmethod
    def of(
        cls,
        data: DataLayout,
        training_data: "Data",
        columns: Sequence[str],
        budget: int = BUDGET,
        held_out: bool = False,
        seconds: float = math.inf,
        title: float | None = None,
    ) -> "LinearRanker | None":
        """Fit to the training rows of a run, in the `columns` that the run's encoder reads, and to the label texts.

        The fit uses the first rows of each part of a version that fit into the part's share of `budget` bytes. As long
        as the fit would take more than `seconds`, the number of rows is halved. Returns None if no rows fit, or if rows
        have only dense vectors. With `held_out`, the rows that the run held out are used as well. `title`: weight of
        the words of titles; None: chosen by fits to some of the rows. Raises TableError.
        """
        labels, table = Table.open(data.labels, "labels"), open_queries(data, training_data.split)
        columns = [name for name in columns if name != DENSE]
        vocabulary = open_vocabulary(data, columns)
        shares = [training_data.training_rows, *([training_data.held_out_rows] if held_out else [])]
        points = read_points(table, shares, columns, vocabulary, budget) if columns else []
        queries = sum(part.rows.rows for part in points)
        entries = sum(len(part.rows.ids) for part in points)
        if not entries:
            return None
        title = choose_title(join_points(points), labels.rows, vocabulary, seconds) if title is None else title
        points += label_points(labels, columns, vocabulary)
        fitted = cls.fit(join_points(points), labels.rows, vocabulary, queries, seconds, title)
        return fitted or cls.of(data, training_data, columns, ENTRY_BYTES * entries // 2, held_out, seconds, title)

    @classmethod
    def fit(
        cls,
        points: Points,
        labels: int,
        vocabulary: int,
        queries: int | None = None,
        seconds: float = math.inf,
        title: float = 0.0,
    ) -> "LinearRanker | None":
        """Fit to `points` with labels in [0, `labels`); document frequencies come from the first `queries` points.

        `title`: weight of the words of titles. Returns None if the fit would take more than `seconds`.
        """
        from scoring.solver import fit_labels
        from trainer.rows.numba_kernels import by_row

        words = RowFeatures.of(points.rows, vocabulary, queries, title)
        x, features = words.weigh(points.rows), len(words.seen)
        columns = SparseRows(*by_row(x.ids, x.row_of().astype(np.int32), x.values, features))
        owners = points.labels.row_of()
        of_label, _, offsets = by_row(points.labels.entries, owners, owners, labels)
        smallest = _SMALLEST / np.sqrt(max(1.0, len(x.ids) / x.rows))
        weights = fit_labels(x, features, columns, Ragged(of_label, offsets), smallest, seconds)
        return None if weights is None else cls(words, weights, labels)

    def rank(self, inputs: Inputs, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (w.x float32 [B, k], ids [B, k]), best first, padded with 0 and -1; correct labels have about 2."""
        return best_labels(self.words(inputs), self.weights, self.labels, k)

    def votes(self, inputs: Inputs, k: int) -> SparseRows:
        """Return the best `k` labels of each row with scores above 0, in ascending order of labels."""
        scores, ids = self.rank(inputs, k)
        order = np.argsort(ids, axis=1)
        ids, scores = take_per_row(ids, order), take_per_row(scores, order)
        found = ids != PAD
        return SparseRows(ids[found], scores[found], offsets_of(found.sum(1)))

    def explain(self, inputs: Inputs, label: int) -> list[tuple[tuple[int, ...], float]]:
        """Return the words and pairs of words of a text, one row, with their contributions to w.x, largest first."""
        assert inputs.tokens is not None, "a text has tokens"
        tokens, size = inputs.tokens.entries.tolist(), self.words.vocabulary + PAIR_BUCKETS
        names = sorted({*((word,) for word in tokens), *itertools.pairwise(tokens)})
        counted = count_features(Inputs(Ragged.from_lists(names)), self.words.vocabulary)
        last = counted.ids[counted.offsets[1:] - 1].tolist()  # the feature of a pair has a greater id than its words
        x, added = self.words(inputs), Counter[int]()
        for place, value in zip(x.ids.tolist(), x.values.tolist(), strict=True):
            of_feature = slice(*self.weights.offsets[place : place + 2])
            weights = self.weights.values[of_feature][self.weights.ids[of_feature] == label]
            added[int(self.words.seen[place]) % size] += value * float(weights.sum())  # a word, also in the title
        found = [(name, added[feature]) for name, feature in zip(names, last, strict=True)]
        return sorted((pair for pair in found if pair[1]), key=lambda pair: -pair[1])

    @classmethod
    def read(cls, table: Table, name: str = FILE) -> "LinearRanker | None":
        """Read the file of `table` that `write` wrote; None if the table has no ranker. Raises TableError."""
        with reading_arrays(table, name, "a linear ranker") as opened:
            if opened is None:
                return None
            arrays, file = opened
            (vocabulary, labels), (title,) = arrays["sizes"].tolist(), arrays["title"].tolist()
            weights = SparseRows(*(arrays[name] for name in _WEIGHTS))
            if not (
                len(arrays["seen"]) == weights.rows
                and 0 <= weights.ids.min(initial=0) <= weights.ids.max(initial=0) < labels
            ):
                raise ValueError("the arrays are inconsistent")
            words = RowFeatures(vocabulary, arrays["seen"], arrays["factors"], title)
            return cls(words, weights, labels, file)

    def write(self, url: str, name: str = FILE) -> Shard:
        arrays = dict(zip(_WEIGHTS, self.weights, strict=True))
        sizes, title = np.array([self.words.vocabulary, self.labels]), np.array([self.words.title], np.float32)
        return write_arrays(
            url,
            name,
            {"sizes": sizes, "title": title, **arrays, "seen": self.words.seen, "factors": self.words.factors},
        )


def label_points(labels: Table, columns: Sequence[str], vocabulary: int) -> Iterator[Points]:
    """Yield the labels' own texts as points; none if `labels` lack one of the `columns`. Raises TableError."""
    first = 0
    for group in labels.batches(with_titles(labels, columns)) if {*columns} <= {*labels.columns} else ():
        own = np.arange(first, first + group.num_rows)
        yield Points(count_features(Inputs.of(group), vocabulary), Ragged.from_matrix(own[:, None]))
        first += group.num_rows


TITLES = (0.0, 0.25, 0.5)  # weights of the words of titles that are tried
_TRIED, _SCORED = 6_000, 1_500  # rows to fit and to score a weight


def choose_title(points: Points, labels: int, vocabulary: int, seconds: float = math.inf) -> float:
    """Return the weight of the words of titles that ranks some of the `points` best, by fits to other points: nDCG@5.

    Returns 0 if the points have no titles, or if no text goes on after its title; and an untried weight if the fits
    would take more than a quarter of `seconds`.
    """
    if not vocabulary:
        return 0.0
    words, titles = points.rows.ids < vocabulary, points.rows.ids >= vocabulary + PAIR_BUCKETS
    fitted = min(_TRIED, points.rows.rows * 4 // 5)
    scored = min(fitted + _SCORED, points.rows.rows)
    if np.count_nonzero(titles) in (0, np.count_nonzero(words)) or not fitted:
        return 0.0
    from trainer.evaluation.metrics import Metrics

    ends = (0, fitted), (fitted, scored)
    of_fit, of_scores = (Points(points.rows.slice(*some), points.labels.slice(*some)) for some in ends)
    found = {}
    for weight in TITLES:
        ranker = LinearRanker.fit(of_fit, labels, vocabulary, None, seconds / (4 * len(TITLES)), weight)
        if ranker is None:
            return TITLES[1]
        metrics = Metrics((5,))
        metrics.update(best_labels(ranker.words.weigh(of_scores.rows), ranker.weights, labels, 5)[1], of_scores.labels)
        found[weight] = metrics.result()["nDCG@5"]
    return max(found, key=lambda weight: found[weight])
