"""Filtered search against zeroing the score matrix first."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.ragged import Ragged
from trainer.evaluation.metrics import Metrics
from trainer.evaluation.ranking import LabelRows, filtered_top_k

seeds = st.integers(0, 2**32 - 1)


def integers(generator: np.random.Generator, rows: int, dimension: int, bound: int) -> torch.Tensor:
    """Vectors of small integers: inner products are exact, and equal ones are common."""
    return torch.from_numpy(generator.integers(-bound, bound + 1, (rows, dimension)).astype(np.float32))


def full_sort(scores: np.ndarray) -> np.ndarray:
    """Every label of each row, by descending score, then ascending id."""
    return np.lexsort((np.broadcast_to(np.arange(scores.shape[1]), scores.shape), -scores))


@given(seeds, st.integers(1, 80), st.integers(1, 10), st.integers(0, 51))
def test_filtered_search_equals_filtering_first(seed: int, labels: int, k: int, longest_row: int) -> None:
    generator = np.random.default_rng(seed)
    queries, vectors = integers(generator, 5, 4, 2), integers(generator, labels, 4, 2)
    rows = [generator.permutation(labels)[: generator.integers(longest_row + 1)] for _ in queries]
    offsets = np.cumsum([0, *map(len, rows)])
    scores, ids = filtered_top_k(queries, LabelRows(vectors), k, Ragged(np.concatenate(rows), offsets))
    matrix = (queries @ vectors.T).numpy()
    for row, filtered in enumerate(rows):
        matrix[row, filtered] = -np.inf
    order = full_sort(matrix)[:, :k]
    expected_scores = np.take_along_axis(matrix, order, axis=1)
    expected = np.where(np.isneginf(expected_scores), -1, order)
    np.testing.assert_array_equal(ids[:, : order.shape[1]], expected)
    np.testing.assert_array_equal(scores[:, : order.shape[1]], expected_scores)
    assert (ids[:, order.shape[1] :] == -1).all()


def test_precision_survives_filter_rows_of_51() -> None:
    """The 51 best of every query are filtered; all positives stand right behind them. A cut at k before finds none."""
    queries = torch.eye(3)
    vectors = torch.arange(200, 0, -1, dtype=torch.float32)[:, None].expand(200, 3)
    filters = Ragged(np.tile(np.arange(51), 3), np.arange(4) * 51)
    positives = Ragged(np.tile(np.arange(51, 56), 3), np.arange(4) * 5)
    _, ids = filtered_top_k(queries, LabelRows(vectors), 5, filters)
    late = Metrics((1, 3, 5))
    late.update(ids, positives)
    assert {name: late.result()[name] for name in ("P@1", "P@3", "P@5")} == {"P@1": 100, "P@3": 100, "P@5": 100}
