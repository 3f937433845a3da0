"""Nearest vectors against sorting all scores, in one step and in many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search import nearest as module
from search.nearest import nearest


@pytest.mark.parametrize("many", [1, 1 << 20])  # Faiss's search, and ours
@given(seed=st.integers(0, 2**32 - 1), sizes=st.tuples(st.integers(0, 6), st.integers(1, 90)), data=st.data())
def test_the_best_of_all(many: int, seed: int, sizes: tuple[int, int], data: st.DataObject) -> None:
    queries, rows = sizes
    count = data.draw(st.integers(1, rows))
    generator = np.random.default_rng(seed)
    # Whole numbers are exact in any order of summation, and repeat.
    x, w = (generator.integers(-2, 3, (n, 5)).astype(np.float32) for n in (queries, rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MANY", many)
        patch.setattr(module, "_SCORES", 1)  # steps of 4 * count
        scores, positions = nearest(x, w, count)
    np.testing.assert_array_equal(scores, -np.sort(-(x @ w.T), axis=1)[:, :count])
    np.testing.assert_array_equal(np.take_along_axis(x @ w.T, positions, 1), scores)
    assert all(len(set(row)) == count for row in positions.tolist())
