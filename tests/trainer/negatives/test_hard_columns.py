"""Draws of hard negatives: distinct, in order, each column equally often, and a query's own whatever the batch."""

import numpy as np

from trainer.negatives.draws import draw_hard

AT = {"seed": 1, "epoch": 2}


def test_draws_are_distinct_ordered_and_uniform() -> None:
    rows, columns, count = 4000, 7, 3
    table = np.tile(np.arange(columns), (rows, 1))
    drawn = draw_hard(table, np.arange(rows), count, **AT, step=0)
    assert drawn.shape == (rows, count)
    assert (np.diff(drawn, axis=1) > 0).all()
    # Chi-squared of independent draws would have 6 degrees of freedom; draws without replacement vary less.
    expected = rows * count / columns
    assert ((np.bincount(drawn.ravel(), minlength=columns) - expected) ** 2 / expected).sum() < 27.9
    # Every set of three columns comes up, about equally often: 35 of them, below 77.5 but once in 10,000.
    _, sets = np.unique(drawn, axis=0, return_counts=True)
    assert len(sets) == 35
    assert ((sets - rows / 35) ** 2 / (rows / 35)).sum() < 77.5


def test_queries_and_steps_differ_and_the_batch_does_not_matter() -> None:
    table = np.arange(240).reshape(12, 20)
    rows = np.random.default_rng(0).integers(0, 1 << 40, 12)
    drawn = draw_hard(table, rows, 5, **AT, step=3)
    assert len({tuple(row) for row in (drawn - 20 * np.arange(12)[:, None]).tolist()}) > 6
    np.testing.assert_array_equal(drawn, draw_hard(table, rows, 5, **AT, step=3))
    assert not np.array_equal(drawn, draw_hard(table, rows, 5, **AT, step=4))
    order = np.random.default_rng(1).permutation(12)[:7]
    np.testing.assert_array_equal(draw_hard(table[order], rows[order], 5, **AT, step=3), drawn[order])
    np.testing.assert_array_equal(draw_hard(table, rows, 20, **AT, step=0), table)
