"""Finds the nearest texts by TF-IDF of words, or of words and pairs of words; these texts vote for their labels."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse
import torch

from schemas import PAD
from schemas.ragged import Ragged, SparseRows
from trainer.encoders.features import (
    PAIR_BUCKETS,
    count_ngrams,
    inverse_document_frequency,
    normalize_rows,
    scale_features,
)
from trainer.evaluation.metrics import Metrics
from trainer.evaluation.search import top_of_block
from trainer.evaluation.votes import NEIGHBOURS, TEMPERATURE, count_votes
from trainer.inputs import Inputs

_BATCH = 200  # number of queries compared at a time
_TRIED = [*itertools.product((10, 30, 100), (0.05, 0.1, 0.2, 0.5))]  # numbers of neighbours, and temperatures
_SAMPLE = 1000  # number of texts to choose by


@dataclass(frozen=True, eq=False)
class NearestTexts:
    """Finds the nearest of `texts` [V, n] by cosine of TF-IDF vectors; the nearest texts vote for their `labels`.

    Features are `vocabulary` words and, with `ngrams` = 2, pairs of words. `factors` [V]: inverse document frequencies.
    The nearest `neighbours` texts vote, as in `count_votes`.
    """

    vocabulary: int
    ngrams: int
    factors: np.ndarray
    texts: scipy.sparse.csr_matrix
    labels: Ragged
    neighbours: int = NEIGHBOURS
    temperature: float = TEMPERATURE

    @classmethod
    def of(cls, texts: Ragged, labels: Ragged, vocabulary: int, ngrams: int = 2) -> "NearestTexts":
        """Build the index from `texts` of token ids, and the `labels` of each text."""
        counted = _count(texts, vocabulary, ngrams)
        frequency = np.bincount(counted.ids, minlength=vocabulary + PAIR_BUCKETS)
        factors = inverse_document_frequency(frequency, texts.rows)
        return cls(vocabulary, ngrams, factors, _weigh(counted, factors).T.tocsr(), labels)

    @classmethod
    def chosen(cls, texts: Ragged, labels: Ragged, vocabulary: int) -> "NearestTexts":
        """Build the index that ranks the labels of a sample of its own texts best, each by the other texts: nDCG@5."""
        sample = np.linspace(0, texts.rows - 1, min(_SAMPLE, texts.rows)).astype(np.int64)
        best, chosen = -1.0, cls.of(texts, labels, vocabulary)
        for ngrams in (1, 2):
            index = cls.of(texts, labels, vocabulary, ngrams)
            cosine, rows = index._nearest(texts.take(sample), max(width for width, _ in _TRIED) + 1)
            rows = np.where(rows == sample[:, None], PAD, rows)
            for width, temperature in _TRIED:
                votes = count_votes(cosine[:, : width + 1], rows[:, : width + 1], labels, temperature)
                metrics = Metrics((5,))
                metrics.update(votes.best(5)[1], labels.take(sample))
                if (found := metrics.result()["nDCG@5"]) > best:
                    best, chosen = found, replace(index, neighbours=width, temperature=temperature)
        return chosen

    def rank(self, inputs: Inputs, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores [B, k], label ids [B, k] best first, padded with -1) for the tokens of B texts."""
        cosine, rows = self._nearest(inputs.tokens or Ragged.empty(0), self.neighbours)
        return count_votes(cosine, rows, self.labels, self.temperature).best(k)

    def _nearest(self, texts: Ragged, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosines and rows [B, width] of the nearest texts that share a word, best first, padded with -1."""
        queries = _weigh(_count(texts, self.vocabulary, self.ngrams), self.factors)
        width = min(width, self.texts.shape[1])
        nearest = [
            top_of_block(torch.from_numpy((queries[start : start + _BATCH] @ self.texts).toarray()), width)
            for start in range(0, max(1, texts.rows), _BATCH)
        ]
        cosine, rows = (torch.cat(parts).numpy() for parts in zip(*nearest, strict=True))
        return cosine, np.where(cosine > 0, rows, PAD)


def _count(texts: Ragged, vocabulary: int, ngrams: int) -> SparseRows:
    return count_ngrams(texts, ngrams=ngrams, vocabulary=vocabulary, buckets=PAIR_BUCKETS)


def _weigh(counted: SparseRows, factors: np.ndarray) -> scipy.sparse.csr_matrix:
    """Return the TF-IDF vectors of counted texts, scaled to unit length."""
    rows = normalize_rows(scale_features(counted, factors))
    return scipy.sparse.csr_matrix((rows.values, rows.ids, rows.offsets), shape=(counted.rows, len(factors)))
