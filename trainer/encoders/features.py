"""Sparse features of token sequences, in columns: tokens and hashed n-grams of them, with TF-IDF weights."""

import numpy as np

from schemas.ragged import Ragged, SparseRows, offsets_of

_MIX = np.uint64(0x9E3779B97F4A7C15)
_FINISH = np.uint64(0xD6E8FEB86659FD93)


def weighted(rows: SparseRows, by_feature: np.ndarray) -> SparseRows:
    """Multiply values by a number per feature."""
    return rows._replace(values=rows.values * by_feature[rows.ids])


def unit(rows: SparseRows) -> SparseRows:
    """Scale each row to unit L2 norm; rows of zeros stay zero."""
    square = np.bincount(rows.row_of(), weights=rows.values.astype(np.float64) ** 2, minlength=rows.rows)
    scale = 1 / np.maximum(np.sqrt(square), 1e-12)
    return rows._replace(values=(rows.values * scale[rows.row_of()]).astype(np.float32))


def side_by_side(one: SparseRows, other: SparseRows) -> SparseRows:
    """Rows of `one`, each followed by that of `other`, whose features are all larger."""
    offsets = one.offsets + other.offsets
    first = np.repeat(other.offsets[:-1], np.diff(one.offsets)) + np.arange(len(one.ids))
    second = np.repeat(one.offsets[1:], np.diff(other.offsets)) + np.arange(len(other.ids))
    features = np.empty(len(first) + len(second), np.int64)
    weights = np.empty(len(features), np.float32)
    features[first], features[second] = one.ids, other.ids
    weights[first], weights[second] = one.values, other.values
    return SparseRows(features, weights, offsets)


def bag_of_ngrams(rows: Ragged, *, ngrams: int, vocabulary: int, buckets: int) -> SparseRows:
    """Count tokens in [0, vocabulary) and hashed n-grams of 2..`ngrams` in [vocabulary, vocabulary + buckets).

    A feature's weight is 1 + ln(its count in the row).
    """
    tokens, row_of = rows.values, rows.row_of()
    ends = rows.offsets[1:][row_of]
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
    features = np.bincount(key // size, minlength=rows.rows)
    weights = (1 + np.log(counts)).astype(np.float32)
    return SparseRows(key % size, weights, offsets_of(features))


def inverse_document_frequency(document_frequency: np.ndarray, documents: int) -> np.ndarray:
    """ln((1 + documents) / (1 + df)) + 1 for every feature, float32."""
    return (np.log((1 + documents) / (1 + document_frequency)) + 1).astype(np.float32)
