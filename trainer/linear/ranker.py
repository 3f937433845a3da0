"""The linear ranker: TF-IDF of words and pairs of words, or a data set's own features, and the tree over them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.errors import InputError
from schemas.ragged import Ragged, SparseRows
from trainer.encoders.features import count_words, inverse_document_frequency, normalize_rows, scale_features
from trainer.inputs import Inputs
from trainer.linear.tree import LabelTree


@dataclass(frozen=True, eq=False)
class RowFeatures:
    """Rows to unit vectors over the features `seen` [F] in training, with their `factors` [F].

    `vocabulary`: tokens, whose pairs are counted too; 0 for rows that have features of their own.
    """

    vocabulary: int
    seen: np.ndarray
    factors: np.ndarray

    @classmethod
    def of(cls, inputs: Inputs, vocabulary: int) -> "RowFeatures":
        """Learn the features of training rows, and the document frequencies of words."""
        rows = _count(inputs, vocabulary)
        seen, frequency = np.unique(rows.ids, return_counts=True)
        factors = inverse_document_frequency(frequency, rows.rows) if vocabulary else np.ones(len(seen), np.float32)
        return cls(vocabulary, seen.astype(np.int64), factors)

    def __call__(self, inputs: Inputs) -> SparseRows:
        """Return unit rows with features numbered [0, F); a feature that no training row had is left out."""
        rows = _count(inputs, self.vocabulary)
        place = np.searchsorted(self.seen, rows.ids)
        known = np.append(self.seen, -1)[place] == rows.ids
        kept = rows.keep(known)._replace(ids=place[known].astype(np.int32))
        return normalize_rows(scale_features(kept, self.factors))


def _count(inputs: Inputs, vocabulary: int) -> SparseRows:
    if vocabulary and inputs.tokens is not None:
        return count_words(inputs.tokens, vocabulary)
    if inputs.features is not None:
        return inputs.features
    raise InputError(
        "the linear ranker reads tokens or features, and these rows have neither. Shard texts, or features."
    )


@dataclass(frozen=True, eq=False)
class LinearRanker:
    """Labels of a row by the words that it has."""

    words: RowFeatures
    tree: LabelTree

    @classmethod
    def fit(
        cls, inputs: Inputs, labels: Ragged, count: int, vocabulary: int, texts: Inputs | None = None
    ) -> "LinearRanker":
        """Fit to training rows with `labels` of [0, `count`); `texts`: those of all labels, which say what is alike."""
        words = RowFeatures.of(inputs, vocabulary)
        x = words(inputs)
        centroids = _sum_of_points(x, len(words.seen), labels, count)
        if texts is not None:
            centroids = _add(centroids, words(texts), len(words.seen))
        return cls(words, LabelTree.fit(x, len(words.seen), labels, centroids))

    def rank(self, inputs: Inputs, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores float32 [B, k] in [0, 1], label ids [B, k] best first); 0 and -1 pad."""
        return self.tree.rank(self.words(inputs), k)


def _sum_of_points(x: SparseRows, features: int, labels: Ragged, count: int) -> SparseRows:
    """Return for each label the unit sum of its points (Yu et al., 2022, PIFA)."""
    listed = SparseRows(labels.entries, np.ones(len(labels.entries), np.float32), labels.offsets - labels.offsets[0])
    return _unit_rows(_matrix(listed, count).T @ _matrix(x, features))


def _add(left: SparseRows, right: SparseRows, features: int) -> SparseRows:
    return _unit_rows(_matrix(left, features) + _matrix(right, features))


def _matrix(rows: SparseRows, columns: int) -> Any:
    import scipy.sparse

    return scipy.sparse.csr_matrix((rows.values, rows.ids, rows.offsets), shape=(rows.rows, columns))


def _unit_rows(matrix: Any) -> SparseRows:
    matrix = matrix.tocsr()
    rows = SparseRows(matrix.indices.astype(np.int32), matrix.data.astype(np.float32), matrix.indptr.astype(np.int64))
    return normalize_rows(rows)
