"""Sparse features of token sequences, in columns: tokens and hashed n-grams of them, with TF-IDF weights."""

from dataclasses import dataclass

import numpy as np

_MIX = np.uint64(0x9E3779B97F4A7C15)
_FINISH = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True)
class SparseRows:
    """B sparse rows: `features` [V] int64, sorted and unique within a row, `weights` [V] float32, `offsets` [B + 1]."""

    features: np.ndarray
    weights: np.ndarray
    offsets: np.ndarray

    def row_of(self) -> np.ndarray:
        """The row of each entry, [V]."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def where(self, kept: np.ndarray) -> "SparseRows":
        """Only the entries where `kept` [V] holds."""
        counts = np.concatenate([[0], np.cumsum(kept)])
        return SparseRows(self.features[kept], self.weights[kept], counts[self.offsets])

    def weighted(self, by_feature: np.ndarray) -> "SparseRows":
        """Weights multiplied by a number per feature."""
        return SparseRows(self.features, self.weights * by_feature[self.features], self.offsets)

    def unit(self) -> "SparseRows":
        """Each row scaled to unit L2 norm; rows of zeros stay zero."""
        square = np.bincount(
            self.row_of(), weights=self.weights.astype(np.float64) ** 2, minlength=len(self.offsets) - 1
        )
        scale = 1 / np.maximum(np.sqrt(square), 1e-12)
        return SparseRows(self.features, (self.weights * scale[self.row_of()]).astype(np.float32), self.offsets)


def side_by_side(one: SparseRows, other: SparseRows) -> SparseRows:
    """Rows of `one`, each followed by that of `other`, whose features are all larger."""
    offsets = one.offsets + other.offsets
    first = np.repeat(other.offsets[:-1], np.diff(one.offsets)) + np.arange(len(one.features))
    second = np.repeat(one.offsets[1:], np.diff(other.offsets)) + np.arange(len(other.features))
    features = np.empty(len(first) + len(second), np.int64)
    weights = np.empty(len(features), np.float32)
    features[first], features[second] = one.features, other.features
    weights[first], weights[second] = one.weights, other.weights
    return SparseRows(features, weights, offsets)


def bag_of_ngrams(tokens: np.ndarray, offsets: np.ndarray, *, ngrams: int, vocabulary: int, buckets: int) -> SparseRows:
    """Tokens in [0, vocabulary) and hashed n-grams of 2..`ngrams` tokens in [vocabulary, vocabulary + buckets).

    `tokens` [V] with `offsets` [B + 1]. A feature's weight is 1 + ln(its count in the row).
    """
    row_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    ends = offsets[1:][row_of]
    size = vocabulary + buckets
    keys = [row_of * size + tokens.astype(np.int64)]
    code = tokens.astype(np.uint64) + np.uint64(1)
    for length in range(2, ngrams + 1):
        code = code[: max(len(tokens) - length + 1, 0)] * _MIX + tokens[length - 1 :].astype(np.uint64) + np.uint64(1)
        inside = np.arange(len(code)) + length <= ends[: len(code)]
        mixed = (code[inside] ^ (code[inside] >> np.uint64(32))) * _FINISH
        bucket = (mixed >> np.uint64(20)).astype(np.int64) % buckets + vocabulary
        keys.append(row_of[: len(code)][inside] * size + bucket)
    key, counts = np.unique(np.concatenate(keys), return_counts=True)
    rows = np.bincount(key // size, minlength=len(offsets) - 1)
    weights = (1 + np.log(counts)).astype(np.float32)
    return SparseRows(key % size, weights, np.concatenate([[0], np.cumsum(rows)]).astype(np.int64))


def inverse_document_frequency(document_frequency: np.ndarray, documents: int) -> np.ndarray:
    """ln((1 + documents) / (1 + df)) + 1 for every feature, float32."""
    return (np.log((1 + documents) / (1 + document_frequency)) + 1).astype(np.float32)
