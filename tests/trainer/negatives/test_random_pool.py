"""Random negatives by any mixture estimate a sum over all labels without bias."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, chisquare

from pipelines.mining.inputs import equal_ranges
from schemas import PAD
from schemas.ragged import Ragged
from tests.builders import batch_of
from tests.trainer.dense import fast, one_vs_all
from tests.trainer.test_unbiased import ERRORS, errors_off, flat
from trainer.methods.astra import Negatives
from trainer.negatives.base import Sampled
from trainer.negatives.draws import RandomPool
from trainer.negatives.planner import Planner

LABELS = 12
FREQUENCY = np.array([0, 1, 50, 3, 0, 0, 7, 9, 200, 1, 2, 0])


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_labels_come_as_often_as_their_weight_says(share: float) -> None:
    draws = RandomPool(LABELS, share, FREQUENCY)
    pool = draws.draw(40_000, seed=1, epoch=0, step=0)
    expected = 1 / draws.weight(40_000)  # k q_l
    assert expected.sum() == pytest.approx(40_000)
    assert chisquare(np.bincount(pool, minlength=LABELS), expected).pvalue > 1e-4
    np.testing.assert_array_equal(pool, draws.draw(40_000, seed=1, epoch=0, step=0))
    assert not np.array_equal(pool[:100], draws.draw(100, seed=1, epoch=0, step=1))


def test_a_rank_knows_the_weights_of_its_labels() -> None:
    whole = RandomPool(LABELS, 0.3, FREQUENCY).weight(5)
    np.testing.assert_array_equal(RandomPool(LABELS, 0.3, FREQUENCY, (4, 9)).weight(5), whole[4:9])


def test_draws_by_frequency_need_the_frequencies() -> None:
    assert RandomPool(LABELS).weight(6) == 2.0
    with pytest.raises(ValueError, match="training points"):
        RandomPool(LABELS, 0.5).draw(3, seed=0, epoch=0, step=0)


AT = {"seed": 2, "epoch": 1, "step": 3}
SIZES = st.sampled_from([1, 2, 7, 63, 64, 65, 1000, 10**8, (1 << 31) + 1, 1 << 40])


@st.composite
def pools(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[tuple[int, int], ...]]:
    """Options of a pool, and the labels [start, stop) of each rank: equal ranges, or any."""
    labels = draw(SIZES)
    options: dict[str, Any] = {"labels": labels}
    if labels <= 1000:
        numbers = np.random.default_rng(labels)
        options["by_frequency"] = draw(st.sampled_from([0.0, 0.4, 1.0]))
        options["frequency"] = numbers.zipf(1.5, labels).clip(max=1000) - 1
        if labels > 1 and draw(st.booleans()):
            options["retired"] = numbers.random(labels) < 0.3
            options["retired"][draw(st.integers(0, labels - 1))] = False
    edges = sorted(draw(st.sets(st.integers(0, labels), max_size=5)) | {0, labels})
    return options, draw(
        st.sampled_from([tuple(itertools.pairwise(edges)), tuple(equal_ranges(0, labels, min(labels, 16)))])
    )


def rows_of(drawn: Ragged, start: int = 0) -> list[list[int]]:
    by_row = np.split(drawn.values.astype(np.int64), drawn.offsets[1:-1])
    return [sorted((row[row != PAD] + start).tolist()) for row in by_row]


@given(pools(), st.sampled_from([0, 1, 5, 64, 400, 3000]), st.lists(st.integers(0, 1 << 40), min_size=1, max_size=4))
def test_ranks_draw_what_one_draws(
    pool: tuple[dict[str, Any], tuple[tuple[int, int], ...]], count: int, rows: list[int]
) -> None:
    options, parts = pool
    whole, row_ids = RandomPool(**options), np.array(rows)
    alone = rows_of(whole.draw_own(count, row_ids, **AT))
    assert [len(labels) for labels in alone] == [count] * len(rows)
    assert all(label < options["labels"] for labels in alone for label in labels)
    if "retired" in options:
        assert not options["retired"][list(itertools.chain(*alone))].any()
    ranks = [RandomPool(**options, label_range=part) for part in parts]
    by_rank = [rows_of(rank.draw_own(count, row_ids, **AT), part[0]) for rank, part in zip(ranks, parts, strict=True)]
    together = [sorted(itertools.chain(*labels)) for labels in zip(*by_rank, strict=True)]
    assert together == alone
    shared = [rank.draw(count, **AT) + part[0] for rank, part in zip(ranks, parts, strict=True)]
    assert sorted(np.concatenate(shared).tolist()) == sorted(whole.draw(count, **AT).tolist())
    assert shared[0].dtype == (np.int32 if options["labels"] <= 1 << 31 else np.int64)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_a_row_draws_by_itself(row: int, other: int) -> None:
    pool = RandomPool(10**6)
    alone, beside = (pool.draw_own(50, np.array(rows), **AT) for rows in ([row], [other, row]))
    np.testing.assert_array_equal(alone.values, beside.values[50:])
    assert row == other or not np.array_equal(beside.values[:50], beside.values[50:])
    assert not np.array_equal(alone.values, pool.draw_own(50, np.array([row]), **{**AT, "step": 4}).values)


@pytest.mark.parametrize(
    ("labels", "rows", "count"), [(20, 1, 9_000), (100, 500, 20), (257, 100, 400), (4096, 40, 5000)]
)
def test_every_label_is_equally_likely(labels: int, rows: int, count: int) -> None:
    drawn = RandomPool(labels).draw_own(count, np.arange(rows), **AT)
    assert chisquare(np.bincount(drawn.values, minlength=labels)).pvalue > 1e-4


def test_counts_of_ranges_are_those_of_independent_draws() -> None:
    rows, count, ranges = 400, 300, 32
    drawn = RandomPool(1 << 20).draw_own(count, np.arange(rows), **AT)
    counts = np.stack([np.bincount(row >> 15, minlength=ranges) for row in drawn.values.reshape(rows, count)])
    spread = float(((counts - count / ranges) ** 2).sum() * ranges / count)  # chi-squared, if multinomial
    assert 1e-4 < chi2.cdf(spread, rows * (ranges - 1)) < 1 - 1e-4
    apart = np.corrcoef(counts[:-1].ravel(), counts[1:].ravel())[0, 1]
    assert abs(apart) < 4 / np.sqrt(counts.size)


class Case:
    """Queries with positives, a table of hard negatives, and others that a source finds."""

    def __init__(self, pool: str, share: float) -> None:
        draw = np.random.default_rng(7)
        options = Negatives(pool=pool, random=5, hard=2, frequency_share=share)
        self.planner = Planner(options, LABELS, seed=3, frequency=FREQUENCY)
        self.positives = [[1, 8], [2], [3, 5, 8]]
        self.batch = batch_of(self.positives, np.array([[2, 3], [4, -1], [0, 2]]))
        # Twice the same, of the table too, and a positive, which none of it may count twice.
        self.sampled = [Sampled(np.array([[2, 7, 7], [-1, 2, 9], [10, 3, 0]]))]
        self.x = torch.from_numpy(draw.standard_normal((3, 2))).requires_grad_()
        self.w = torch.from_numpy(draw.standard_normal((LABELS, 2))).requires_grad_()

    def estimates(self, draws: int, planner: Planner) -> np.ndarray:
        plan = partial(planner, sampled=self.sampled)
        batches = (self.batch.__class__(0, step, *list(vars(self.batch).values())[2:]) for step in range(draws))
        return np.stack([flat(fast(self.x, self.w, plan(batch))) for batch in batches])


@pytest.mark.parametrize("pool", ["shared", "own"])
@pytest.mark.parametrize("share", [0.5, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 1.0))])
def test_any_mixture_of_sources_and_draws_estimates_one_vs_all(pool: str, share: float) -> None:
    case = Case(pool, share)
    full = one_vs_all(case.x, case.w, case.positives)
    assert errors_off(case.estimates(800, case.planner), full) < ERRORS


@pytest.mark.parametrize("pool", ["shared", "own"])
def test_the_check_sees_weights_of_another_mixture(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(pool, 0.5)
    full = one_vs_all(case.x, case.w, case.positives)
    monkeypatch.setattr(RandomPool, "weight", lambda draws, size: draws.labels / size)
    assert errors_off(case.estimates(800, case.planner), full) > 2 * ERRORS
