"""Sparse features of token sequences: tokens and their hashed n-grams, with TF-IDF weights."""

import numpy as np

from schemas.ragged import Ragged, SparseRows, counts_of, is_first_key, offsets_of

PAIR_BUCKETS = 1 << 20  # number of features for pairs of words
_MIX = np.uint64(0x9E3779B97F4A7C15)
_FINISH = np.uint64(0xD6E8FEB86659FD93)


def scale_features(rows: SparseRows, factors: np.ndarray) -> SparseRows:
    """Multiply each value by the factor of its feature."""
    return rows._replace(values=rows.values * factors[rows.ids])


def normalize_rows(rows: SparseRows) -> SparseRows:
    """Scale each row to unit L2 norm; zero rows stay zero."""
    row_of, values = rows.row_of(), rows.values.astype(np.float64)
    square = np.bincount(row_of, values * values, rows.rows)
    scale = 1 / np.maximum(np.sqrt(square), 1e-12)
    return rows._replace(values=(values * scale[row_of]).astype(np.float32))


def join_rows(left: SparseRows, right: SparseRows) -> SparseRows:
    """Append each row of `right` to the row of `left` with the same index; all ids in `right` must be larger."""
    both = SparseRows.join([left, right])
    # Row i of `left`, followed by row i of `right`.
    return both.take(np.arange(2 * left.rows).reshape(2, -1).T.ravel())._replace(offsets=left.offsets + right.offsets)


def count_ngrams(rows: Ragged, *, ngrams: int, vocabulary: int, buckets: int, damped: bool = True) -> SparseRows:
    """Count the tokens and the hashed n-grams of 2 to `ngrams` tokens in each row.

    Tokens have ids [0, vocabulary), n-grams have ids [vocabulary, vocabulary + buckets). The weight of a feature is 1 +
    ln(count in the row), or the count itself if not `damped`.
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
    key = np.concatenate(keys)
    key.sort()
    first = np.flatnonzero(is_first_key(key))
    row, features = np.divmod(key[first], size)
    counts = counts_of(np.append(first, len(key)))
    weights = ((1 + np.log(counts)) if damped else counts).astype(np.float32)
    return SparseRows(features, weights, offsets_of(np.bincount(row, minlength=rows.rows)))


def count_words(rows: Ragged, vocabulary: int, damped: bool = True) -> SparseRows:
    """Count tokens, with ids [0, vocabulary), and pairs, with ids [vocabulary, vocabulary + PAIR_BUCKETS)."""
    return count_ngrams(rows, ngrams=2, vocabulary=vocabulary, buckets=PAIR_BUCKETS, damped=damped)


def inverse_document_frequency(document_frequency: np.ndarray, documents: int) -> np.ndarray:
    """Return ln((1 + documents) / (1 + df)) + 1 for every feature, float32."""
    return (np.log((1 + documents) / (1 + document_frequency)) + 1).astype(np.float32)
