"""Bags of n-grams against dictionaries of plain Python."""

import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from schemas.ragged import SparseRows
from tests.builders import Rows, ragged
from trainer.encoders.bag import count_ngrams, inverse_document_frequency, join_rows, normalize_rows

VOCABULARY = 20
WORD = 2**64

rows_of_tokens = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=8), max_size=8)


def bucket(gram: list[int], buckets: int) -> int:
    """The hash of one n-gram in arithmetic modulo 2**64, as the columns compute it for all at once."""
    code = gram[0] + 1
    for token in gram[1:]:
        code = (code * 0x9E3779B97F4A7C15 + token + 1) % WORD
    mixed = (code ^ (code >> 32)) * 0xD6E8FEB86659FD93 % WORD
    return VOCABULARY + (mixed >> 20) % buckets


def brute_force(rows: Rows, ngrams: int, buckets: int) -> list[dict[int, float]]:
    """Each row's features and their weights."""
    bags = []
    for row in rows:
        counts = Counter(row)
        for length in range(2, ngrams + 1):
            counts.update(bucket(row[first : first + length], buckets) for first in range(len(row) - length + 1))
        bags.append({feature: 1 + math.log(count) for feature, count in counts.items()})
    return bags


def as_dicts(rows: SparseRows) -> list[dict[int, float]]:
    return [
        dict(zip(rows.ids[low:high].tolist(), rows.values[low:high].tolist(), strict=True))
        for low, high in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)
    ]


def bag(rows: Rows, ngrams: int = 2, buckets: int = 1000) -> SparseRows:
    return count_ngrams(ragged(rows, np.uint16), ngrams=ngrams, vocabulary=VOCABULARY, buckets=buckets)


@given(rows_of_tokens, st.integers(1, 4), st.sampled_from([1, 7, 1000]))
def test_bags_are_those_of_a_dictionary_a_row(rows: Rows, ngrams: int, buckets: int) -> None:
    bags, expected = bag(rows, ngrams, buckets), brute_force(rows, ngrams, buckets)
    for row, weights in zip(as_dicts(bags), expected, strict=True):
        assert row.keys() == weights.keys()
        np.testing.assert_allclose([row[f] for f in weights], list(weights.values()), rtol=1e-6)
    assert bags.values.dtype == np.float32
    for low, high in zip(bags.offsets[:-1], bags.offsets[1:], strict=True):
        assert (np.diff(bags.ids[low:high]) > 0).all()  # sorted, each once


@given(rows_of_tokens)
def test_unit_rows_have_unit_norm_or_are_empty(rows: Rows) -> None:
    for row in as_dicts(normalize_rows(bag(rows))):
        assert not row or math.isclose(math.fsum(w * w for w in row.values()), 1, rel_tol=1e-5)


@given(rows_of_tokens, st.integers(0, 99))
def test_keep_keeps_what_it_is_told_to(rows: Rows, seed: int) -> None:
    whole = bag(rows)
    kept = np.random.default_rng(seed).random(len(whole.ids)) < 0.5
    expected: list[dict[int, float]] = [{} for _ in rows]
    for row, feature, weight, keep in zip(whole.row_of(), whole.ids, whole.values, kept, strict=True):
        if keep:
            expected[row][int(feature)] = float(weight)
    assert as_dicts(whole.keep(kept)) == expected


def test_inverse_document_frequency() -> None:
    idf = inverse_document_frequency(np.array([0, 1, 9]), 9)
    np.testing.assert_allclose(idf, [math.log(10) + 1, math.log(5) + 1, 1], rtol=1e-6)
    assert idf.dtype == np.float32


@given(st.lists(st.tuples(st.sets(st.integers(0, 9)), st.sets(st.integers(10, 19))), max_size=8))
def test_joined_rows_keep_their_order(pairs: list[tuple[set[int], set[int]]]) -> None:
    left, right = ([sorted(pair[side]) for pair in pairs] for side in (0, 1))
    parts = []
    for rows in (left, right):
        features, offsets = ragged(rows)
        parts.append(SparseRows(features, (features * 0.5).astype(np.float32), offsets))
    joined = join_rows(*parts)
    assert [*map(list, as_dicts(joined))] == [first + second for first, second in zip(left, right, strict=True)]
    np.testing.assert_array_equal(joined.values, joined.ids * 0.5)
