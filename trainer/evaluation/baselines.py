"""Baselines without training: popular labels, and labels of the nearest texts by TF-IDF."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import scipy.sparse

from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.ragged import Ragged
from schemas.shard_files.parquet import filters_of, list_column
from schemas.shard_files.shards import iterate
from schemas.tables import PAD
from trainer.encoders.features import count_ngrams, inverse_document_frequency
from trainer.evaluation.memory.votes import NEIGHBOURS, best_votes, count_votes
from trainer.evaluation.metrics import Metrics

TEXTS = 250_000  # of training points that are compared, at most
QUERIES = 2_000  # of a split that are scored
_BUCKETS = 1 << 20  # for pairs of tokens
_BATCH = 200  # queries that are compared at a time


class Baseline(Protocol):
    """A ranking of labels."""

    def rank(self, texts: Ragged, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores [B, k], label ids [B, k] best first, -1 pads) for texts of token ids."""


@dataclass(frozen=True, eq=False)
class Popularity:
    """The labels with the most training points, for every query; `frequency` [L]."""

    frequency: np.ndarray

    def rank(self, texts: Ragged, k: int) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(-self.frequency, kind="stable")[:k]
        order = np.pad(order, (0, k - len(order)), constant_values=PAD)
        scores = np.where(order == PAD, -np.inf, self.frequency[order])
        return np.tile(scores, (texts.rows, 1)), np.tile(order, (texts.rows, 1))


@dataclass(frozen=True, eq=False)
class NearestTexts:
    """Cosine of TF-IDF weights of words and pairs of words with `texts` [n, V], which vote for their `labels`."""

    vectorizer: "Vectorizer"
    texts: scipy.sparse.csr_matrix
    labels: Ragged

    @classmethod
    def of(cls, texts: Ragged, labels: Ragged, vocabulary: int) -> "NearestTexts":
        """Learn document frequencies from `texts` of token ids, which have `labels`."""
        vectorizer = Vectorizer.of(texts, vocabulary)
        return cls(vectorizer, vectorizer(texts), labels)

    def rank(self, texts: Ragged, k: int) -> tuple[np.ndarray, np.ndarray]:
        similarity, rows = self._nearest(self.vectorizer(texts))
        return best_votes(count_votes(similarity, rows, self.labels), k)

    def _nearest(self, queries: scipy.sparse.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
        """Return (cosine [B, K], row of a text [B, K]) of those that share a word with a query, -1 pads."""
        width = min(NEIGHBOURS, self.texts.shape[0])
        cosine = np.zeros((queries.shape[0], width), np.float32)
        rows = np.full((queries.shape[0], width), PAD, np.int64)
        for start in range(0, queries.shape[0], _BATCH):
            product = (queries[start : start + _BATCH] @ self.texts.T).tocsr()
            for number in range(product.shape[0]):
                entries = slice(product.indptr[number], product.indptr[number + 1])
                values, ids = product.data[entries], product.indices[entries]
                best = np.lexsort((ids, -values))[:width] if len(ids) <= width else _largest(values, ids, width)
                cosine[start + number, : len(best)] = values[best]
                rows[start + number, : len(best)] = ids[best]
        return cosine, rows


@dataclass(frozen=True, eq=False)
class Vectorizer:
    """Token ids to TF-IDF weights of unit length; `weights` [V] by feature."""

    vocabulary: int
    weights: np.ndarray

    @classmethod
    def of(cls, texts: Ragged, vocabulary: int) -> "Vectorizer":
        """Learn document frequencies."""
        counted = count_ngrams(texts, ngrams=2, vocabulary=vocabulary, buckets=_BUCKETS)
        frequency = np.bincount(counted.ids, minlength=vocabulary + _BUCKETS)
        return cls(vocabulary, inverse_document_frequency(frequency, texts.rows))

    def __call__(self, texts: Ragged) -> scipy.sparse.csr_matrix:
        counted = count_ngrams(texts, ngrams=2, vocabulary=self.vocabulary, buckets=_BUCKETS)
        values = counted.values * self.weights[counted.ids]
        rows = scipy.sparse.csr_matrix((values, counted.ids, counted.offsets), shape=(texts.rows, len(self.weights)))
        norms = np.sqrt(np.asarray(rows.multiply(rows).sum(1)).ravel())
        return scipy.sparse.diags(1 / np.maximum(norms, 1e-12)).dot(rows).tocsr().astype(np.float32)


def score(baseline: Baseline, groups: Iterable, metrics: Metrics) -> dict[str, float]:
    """Return the metrics of a baseline over `groups` of queries with their labels and filters."""
    depth = max(metrics.ks)
    for rows in groups:
        filters = filters_of(rows)
        scores, ids = baseline.rank(list_column(rows, "input_ids"), depth + filters.longest)
        top, _ = filters.filter_ranking(ids, scores, depth)
        metrics.update(top, list_column(rows, "label_ids"))
    return metrics.result()


def label_texts(data: DataLayout) -> Ragged:
    """Read the tokens of all labels' texts. Raises TableError."""
    return _tokens(iterate(data.labels, open_manifest(data.labels, "labels"), ["input_ids"]), "input_ids")


def _tokens(groups: Iterator, column: str) -> Ragged:
    parts = [list_column(group, column) for group in groups]
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.concat(part)
    return joined


def _largest(values: np.ndarray, ids: np.ndarray, width: int) -> np.ndarray:
    """Return the places of the `width` greatest values, best first, equal ones by ascending id."""
    among = np.argpartition(-values, width - 1)[:width]
    return among[np.lexsort((ids[among], -values[among]))]
