"""Nearest texts by TF-IDF of words and pairs of words, which vote for their labels."""

from dataclasses import dataclass

import numpy as np
import scipy.sparse

from schemas import PAD
from schemas.ragged import Ragged
from trainer.encoders.features import PAIR_BUCKETS, count_words, inverse_document_frequency
from trainer.evaluation.memory import NEIGHBOURS, best_votes, count_votes

_BATCH = 200  # queries that are compared at a time


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
        """Return (scores [B, k], label ids [B, k] best first, -1 pads) for texts of token ids."""
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
        counted = count_words(texts, vocabulary)
        frequency = np.bincount(counted.ids, minlength=vocabulary + PAIR_BUCKETS)
        return cls(vocabulary, inverse_document_frequency(frequency, texts.rows))

    def __call__(self, texts: Ragged) -> scipy.sparse.csr_matrix:
        counted = count_words(texts, self.vocabulary)
        values = counted.values * self.weights[counted.ids]
        rows = scipy.sparse.csr_matrix((values, counted.ids, counted.offsets), shape=(texts.rows, len(self.weights)))
        norms = np.sqrt(np.asarray(rows.multiply(rows).sum(1)).ravel())
        return scipy.sparse.diags(1 / np.maximum(norms, 1e-12)).dot(rows).tocsr().astype(np.float32)


def _largest(values: np.ndarray, ids: np.ndarray, width: int) -> np.ndarray:
    """Return the places of the `width` greatest values, best first, equal ones by ascending id."""
    among = np.argpartition(-values, width - 1)[:width]
    return among[np.lexsort((ids[among], -values[among]))]
