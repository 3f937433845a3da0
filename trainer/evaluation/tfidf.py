"""Finds the nearest texts by TF-IDF of words and pairs of words; these texts vote for their labels."""

from dataclasses import dataclass

import numpy as np
import scipy.sparse
import torch

from schemas import PAD
from schemas.ragged import Ragged
from trainer.encoders.features import (
    PAIR_BUCKETS,
    count_words,
    inverse_document_frequency,
    normalize_rows,
    scale_features,
)
from trainer.evaluation.search import top_of_block
from trainer.evaluation.votes import NEIGHBOURS, count_votes

_BATCH = 200  # number of queries compared at a time


@dataclass(frozen=True, eq=False)
class NearestTexts:
    """Finds the nearest of `texts` [n, V] by cosine of TF-IDF vectors; the nearest texts vote for their `labels`.

    Features are `vocabulary` words and pairs of words. `factors` [V]: inverse document frequencies.
    """

    vocabulary: int
    factors: np.ndarray
    texts: scipy.sparse.csr_matrix
    labels: Ragged

    @classmethod
    def of(cls, texts: Ragged, labels: Ragged, vocabulary: int) -> "NearestTexts":
        """Build the index from `texts` of token ids, and the `labels` of each text."""
        frequency = np.bincount(count_words(texts, vocabulary).ids, minlength=vocabulary + PAIR_BUCKETS)
        factors = inverse_document_frequency(frequency, texts.rows)
        return cls(vocabulary, factors, _weigh(texts, vocabulary, factors), labels)

    def rank(self, texts: Ragged, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores [B, k], label ids [B, k] best first, padded with -1) for texts of token ids."""
        queries, width = _weigh(texts, self.vocabulary, self.factors), min(NEIGHBOURS, self.texts.shape[0])
        nearest = [
            top_of_block(torch.from_numpy((queries[start : start + _BATCH] @ self.texts.T).toarray()), width)
            for start in range(0, max(1, texts.rows), _BATCH)
        ]
        cosine, rows = (torch.cat(parts).numpy() for parts in zip(*nearest, strict=True))
        shared = np.where(cosine > 0, rows, PAD)  # texts that share a word with the query
        return count_votes(cosine, shared, self.labels).best(k)


def _weigh(texts: Ragged, vocabulary: int, factors: np.ndarray) -> scipy.sparse.csr_matrix:
    """Return the TF-IDF vectors of texts, scaled to unit length."""
    rows = normalize_rows(scale_features(count_words(texts, vocabulary), factors))
    return scipy.sparse.csr_matrix((rows.values, rows.ids, rows.offsets), shape=(texts.rows, len(factors)))
