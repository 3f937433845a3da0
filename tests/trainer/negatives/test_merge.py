"""Merged labels against a plain dictionary."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import PAD
from tests.builders import batch_of
from trainer.negatives.merge import merge
from trainer.negatives.planner import shared_pool
from trainer.stream.batch import Candidates

# Few labels meet often; of the others every digit that is sorted by differs.
WEIGHT = 0.7  # of a draw
LABELS = st.one_of(st.integers(0, 9), st.integers(0, 9).map(lambda n: n << 30), st.integers(0, 2**40 - 1))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """Positives by query, hard negatives with padding, and draws, which repeat each other and the rest."""
    rows, hard, width = draw(st.integers(0, 5)), draw(st.integers(0, 4)), draw(st.integers(0, 6))
    padded = st.one_of(LABELS, st.just(PAD))
    positives = [draw(st.lists(LABELS, max_size=4)) for _ in range(rows)]
    negatives = [[draw(padded) for _ in range(hard)] for _ in range(rows)]
    repeated = st.sampled_from([*itertools.chain(*positives, *negatives), PAD, 3])
    draws = [[draw(st.one_of(padded, repeated)) for _ in range(width)] for _ in range(rows)]
    return positives, np.array(negatives, np.int64).reshape(rows, hard), np.array(draws, np.int64).reshape(rows, width)


def by_dictionary(positives: list[list[int]], hard: np.ndarray, draws: np.ndarray) -> Candidates:
    pairs: list[tuple[int, int, bool, int]] = []
    for row, labels in enumerate(positives):
        negatives = [label for label in hard[row].tolist() if label != PAD]
        drawn = {label: 0 for label in draws[row].tolist() if label not in (PAD, *labels, *negatives)}
        for label in draws[row].tolist():
            if label in drawn:
                drawn[label] += 1
        pairs += [(row, label, True, 0) for label in labels]
        pairs += [(row, label, False, 0) for label in negatives]
        pairs += [(row, label, False, count) for label, count in drawn.items()]
    ids = sorted({label for _, label, _, _ in pairs})
    columns = ([row, ids.index(label), positive, WEIGHT * count or 1] for row, label, positive, count in pairs)
    query, place, positive, weight = np.array(list(columns), np.float64).reshape(-1, 4).T
    return Candidates(
        np.array(ids, np.int64), query, place.astype(int), positive.astype(bool), weight.astype(np.float32)
    )


@given(batches())
def test_labels_ascend_and_every_pair_comes_once(batch: tuple) -> None:
    positives, hard, draws = batch
    for got, expected in zip(merge(*ragged(positives), hard, draws, WEIGHT), by_dictionary(*batch), strict=True):
        np.testing.assert_array_equal(got, expected)


@given(batches(), st.lists(LABELS, max_size=12))
def test_a_shared_pool_comes_before_the_other_labels(batch: tuple, pool: list[int]) -> None:
    positives, hard, _ = batch
    candidates = shared_pool(batch_of(positives, hard), hard, np.array(pool, np.int64), 2.0)
    drawn = Counter(pool)
    size = len(drawn)
    assert candidates.ids[:size].tolist() == sorted(drawn)
    assert candidates.pool_weight.tolist() == [2 * drawn[label] for label in sorted(drawn)]
    merged = by_dictionary(positives, hard, np.empty((len(positives), 0), np.int64))
    assert candidates.ids[size:].tolist() == [label for label in merged.ids.tolist() if label not in drawn]
    np.testing.assert_array_equal(candidates.ids[candidates.pair_label], merged.ids[merged.pair_label])
    np.testing.assert_array_equal(candidates.pair_query, merged.pair_query)
    np.testing.assert_array_equal(candidates.pair_positive, merged.pair_positive)
    masked = [
        (query, label)
        for query, label in zip(merged.pair_query, merged.ids[merged.pair_label], strict=True)
        if label in drawn
    ]
    got = zip(candidates.masked_query, candidates.ids[candidates.masked_pool], strict=True)
    assert list(got) == masked


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="make the batch smaller"):
        merge(*ragged([[]]), None, np.zeros((1, 2**24), np.int64))


def ragged(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(list(itertools.chain(*rows)), np.int64), np.array([0, *itertools.accumulate(map(len, rows))])
