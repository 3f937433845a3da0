"""Draws: uniform pools, columns of the table, and pairs that hold every label once."""

import numpy as np
import pytest

from tests.builders import batch_of
from trainer.config import Negatives
from trainer.negatives.candidates import shared_pool
from trainer.negatives.planner import Planner, draw_hard
from trainer.negatives.random_pool import draw_pool

AT = {"seed": 1, "epoch": 2}


def test_a_pool_is_uniform_over_all_labels_and_drawn_anew_each_step() -> None:
    counts = np.bincount(np.concatenate([draw_pool(20, 500, **AT, step=step) for step in range(20)]), minlength=20)
    # Chi-squared with 19 degrees of freedom is below 50.8 but once in 10,000.
    assert len(counts) == 20
    assert ((counts - 500) ** 2 / 500).sum() < 50.8
    np.testing.assert_array_equal(draw_pool(20, 9, **AT, step=3), draw_pool(20, 9, **AT, step=3))
    assert not np.array_equal(draw_pool(20, 9, **AT, step=3), draw_pool(20, 9, **AT, step=4))


def test_hard_columns_are_distinct_and_each_comes_up() -> None:
    table = np.arange(24).reshape(4, 6)
    seen = set()
    for step in range(40):
        drawn = draw_hard(table, 2, **AT, step=step)
        columns = drawn[0]
        np.testing.assert_array_equal(drawn, table[:, columns])
        assert len(set(columns.tolist())) == 2
        seen |= set(columns.tolist())
    assert seen == set(range(6))
    np.testing.assert_array_equal(draw_hard(table, 6, **AT, step=0), table)


def test_a_shared_pool_touches_each_label_once() -> None:
    candidates = shared_pool(batch_of([[3, 4], [4, 7]]), None, np.array([4, 9, 9, 1, 4]), 2.0)
    np.testing.assert_array_equal(candidates.ids, [1, 4, 9, 3, 7])
    np.testing.assert_array_equal(candidates.pool_weight, [2, 4, 4])
    assert set(zip(candidates.masked_query.tolist(), candidates.masked_pool.tolist(), strict=True)) == {(0, 1), (1, 1)}


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        (Negatives(random=30, hard=3), 33, 30),  # Algorithm 1, step 8
        (Negatives(random=0, hard=3, warmup=50), 50, 0),
        (Negatives(random=30, hard=0), 30, 30),
    ],
)
def test_how_many_negatives_are_random_before_and_with_a_table(options: Negatives, before: int, after: int) -> None:
    labels = 10_000
    for hard, size in ((None, before), (np.full((2, 3), 9), after)):
        batch = batch_of([[1], [2]], hard if options.hard else None)
        (candidates,) = Planner(options, labels).chunks(batch)
        draws = candidates.pool_weight * size / labels  # each draw weighs L / k_r
        assert draws.sum() == pytest.approx(size)
