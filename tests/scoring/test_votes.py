"""Votes of training points against dictionaries of plain Python."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.ragged import SparseRows
from scoring.memory import TEMPERATURE, count_votes, votes_of
from tests.builders import Rows, ragged

LABELS = 12
Votes = list[dict[int, float]]


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, Rows]:
    """Similarities and rows [B, K], pads among them, and the labels of all points; equal similarities are common."""
    points = draw(st.lists(st.lists(st.integers(0, LABELS - 1), unique=True, max_size=4), min_size=1, max_size=8))
    queries, width = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    row = st.lists(st.integers(-1, len(points) - 1), min_size=width, max_size=width)
    rows = np.array(draw(st.lists(row, min_size=queries, max_size=queries)), np.int64).reshape(queries, width)
    values = st.sampled_from([-1.0, 0.0, 0.25, 0.9, 1.0]) | st.floats(-1, 1, width=32)
    similarity = [[draw(values) for _ in range(width)] for _ in range(queries)]
    return np.array(similarity, np.float32).reshape(queries, width), rows, points


def brute_force(similarity: np.ndarray, rows: np.ndarray, points: Rows, temperature: float) -> Votes:
    """Each query's labels and their votes."""
    votes = []
    for values, ids in zip(similarity.tolist(), rows.tolist(), strict=True):
        weights = [
            (math.exp((value - 1) / temperature), row) for value, row in zip(values, ids, strict=True) if row >= 0
        ]
        total, counted = sum(weight for weight, _ in weights), Counter[int]()
        for weight, row in weights:
            counted.update(dict.fromkeys(points[row], weight / total))
        votes.append(dict(counted))
    return votes


def as_dicts(votes: SparseRows) -> Votes:
    return [
        dict(zip(votes.ids[low:high].tolist(), votes.values[low:high].tolist(), strict=True))
        for low, high in zip(votes.offsets[:-1], votes.offsets[1:], strict=True)
    ]


def sparse(votes: Votes) -> SparseRows:
    rows = [sorted(row.items()) for row in votes]
    ids = ragged([[label for label, _ in row] for row in rows])
    return SparseRows(ids.values, np.array([vote for row in rows for _, vote in row], np.float32), ids.offsets)


@given(neighbours(), st.sampled_from([TEMPERATURE, 0.01, 1.0]))
def test_votes_are_those_of_a_dictionary(case: tuple[np.ndarray, np.ndarray, Rows], temperature: float) -> None:
    similarity, rows, points = case
    votes = count_votes(similarity, rows, ragged(points), temperature)
    expected = brute_force(similarity, rows, points, temperature)
    assert votes.rows == len(rows)
    assert votes.values.dtype == np.float32
    for got, row in zip(as_dicts(votes), expected, strict=True):
        assert list(got) == sorted(row)
        assert got == pytest.approx(row, abs=1e-6)
        assert all(0 <= vote <= 1 + 1e-6 for vote in got.values())


some_votes = st.lists(
    st.dictionaries(st.integers(0, LABELS - 1), st.sampled_from([0.125, 0.25, 0.5, 1.0]), max_size=6), max_size=5
)


@given(some_votes, st.integers(0, 8))
def test_the_best_come_first_and_equal_ones_by_their_id(votes: Votes, k: int) -> None:
    scores, ids = sparse(votes).best(k)
    assert scores.shape == ids.shape == (len(votes), k)
    for values, labels, row in zip(scores.tolist(), ids.tolist(), votes, strict=True):
        expected = sorted(row, key=lambda label: (-row[label], label))[:k]
        assert labels == expected + [-1] * (k - len(expected))
        assert values == [row[label] for label in expected] + [-math.inf] * (k - len(expected))


@given(some_votes, st.integers(0, 2**32), st.integers(0, 5))
def test_votes_of_labels_are_looked_up(votes: Votes, seed: int, width: int) -> None:
    ids = np.random.default_rng(seed).integers(-1, LABELS + 3, (len(votes), width))
    expected = [[row.get(label, 0.0) for label in labels] for row, labels in zip(votes, ids.tolist(), strict=True)]
    assert votes_of(sparse(votes), ids).tolist() == expected
