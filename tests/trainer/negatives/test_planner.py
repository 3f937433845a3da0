"""Draws: uniform pools, columns of the table, and pairs that hold every label once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import batch_of
from trainer.config import Negatives
from trainer.methods.ngame import InBatch
from trainer.negatives.candidates import draw_positives, shared_pool
from trainer.negatives.draws import draw_pool
from trainer.negatives.planner import Planner

AT = {"seed": 1, "epoch": 2}


def test_a_pool_is_uniform_over_all_labels_and_drawn_anew_each_step() -> None:
    counts = np.bincount(np.concatenate([draw_pool(20, 500, **AT, step=step) for step in range(20)]), minlength=20)
    # Chi-squared with 19 degrees of freedom is below 50.8 but once in 10,000.
    assert len(counts) == 20
    assert ((counts - 500) ** 2 / 500).sum() < 50.8
    np.testing.assert_array_equal(draw_pool(20, 9, **AT, step=3), draw_pool(20, 9, **AT, step=3))
    assert not np.array_equal(draw_pool(20, 9, **AT, step=3), draw_pool(20, 9, **AT, step=4))


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


LABELS = 40
LISTS = st.lists(st.sets(st.integers(0, LABELS - 1), max_size=4).map(sorted), min_size=1, max_size=6)


@given(LISTS, st.integers(0, 2), st.sampled_from([(0, LABELS), (0, 13), (13, 29), (29, LABELS)]), st.integers(0, 9))
def test_the_pool_of_a_batch_is_what_its_queries_bring(
    positives: list[list[int]], drawn: int, part: tuple[int, int], step: int
) -> None:
    whole = batch_of(positives)
    batch = replace(whole, step=step)
    weight = np.linspace(1, 2, LABELS).astype(np.float32)
    planner = Planner(InBatch(), LABELS, 3, weight, part, positives=drawn)
    (candidates,) = planner.chunks(batch)
    mask = draw_positives(batch, drawn, 3)
    ends = batch.positive_offsets
    learnt = [
        [label for at, label in enumerate(own, int(ends[query])) if mask is None or mask[at]]
        for query, own in enumerate(positives)
    ]
    inside = range(*part)
    pool = sorted({label for own in learnt for label in own} & set(inside))
    assert (candidates.ids + part[0]).tolist() == pool
    pairs = {
        (int(query), int(candidates.ids[place]) + part[0], float(pair_weight))
        for query, place, pair_weight in zip(
            candidates.pair_query, candidates.pair_label, candidates.pair_weight, strict=True
        )
    }
    assert candidates.pair_positive.all()
    assert pairs == {
        (query, label, float(weight[label])) for query, own in enumerate(learnt) for label in own if label in inside
    }
    # A query's own positive is no negative of it, drawn or not.
    masked = zip(
        candidates.masked_query.tolist(), (candidates.ids + part[0])[candidates.masked_pool].tolist(), strict=True
    )
    assert set(masked) == {(query, label) for query, own in enumerate(positives) for label in own if label in pool}
    assert (candidates.pool_weight == 1).all()
