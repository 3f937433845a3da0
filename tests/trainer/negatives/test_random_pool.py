"""Random negatives by any mixture estimate a sum over all labels without bias."""

from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from schemas.randomness import Purpose, generator
from tests.builders import batch_of
from tests.trainer.dense import fast, one_vs_all
from tests.trainer.test_unbiased import ERRORS, errors_off, flat
from trainer.config import Negatives
from trainer.negatives.base import Sampled
from trainer.negatives.draws import RandomPool, draw_pool
from trainer.negatives.planner import Planner

LABELS = 12
FREQUENCY = np.array([0, 1, 50, 3, 0, 0, 7, 9, 200, 1, 2, 0])


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_labels_come_as_often_as_their_weight_says(share: float, power: float) -> None:
    draws = RandomPool(LABELS, share, power, FREQUENCY)
    pool = draws.draw(40_000, seed=1, epoch=0, step=0)
    expected = 1 / draws.weight(40_000)  # k q_l
    assert expected.sum() == pytest.approx(40_000)
    assert chisquare(np.bincount(pool, minlength=LABELS), expected).pvalue > 1e-4
    np.testing.assert_array_equal(pool, draws.draw(40_000, seed=1, epoch=0, step=0))
    assert not np.array_equal(pool[:100], draws.draw(100, seed=1, epoch=0, step=1))


def test_a_rank_knows_the_weights_of_its_labels() -> None:
    whole = RandomPool(LABELS, 0.3, 1.0, FREQUENCY).weight(5)
    np.testing.assert_array_equal(RandomPool(LABELS, 0.3, 1.0, FREQUENCY, (4, 9)).weight(5), whole[4:9])


def test_without_frequencies_draws_are_uniform() -> None:
    draws = RandomPool(LABELS)
    assert draws.weight(6) == 2.0
    pool = draw_pool(LABELS, 9, seed=2, epoch=1, step=3)
    np.testing.assert_array_equal(draws.draw(9, seed=2, epoch=1, step=3), pool)
    with pytest.raises(ValueError, match="training points"):
        RandomPool(LABELS, 0.5).draw(3, seed=0, epoch=0, step=0)


@pytest.mark.parametrize("labels", [1, 2, 3, 20, 1 << 17, 10**8, 1431655766, (1 << 31) - 5, 1 << 31, 1 << 40])
@pytest.mark.parametrize("size", [0, 1, 7, 2000])
def test_draws_are_those_of_the_generator(labels: int, size: int) -> None:
    for seed, step in ((0, 0), (2**63 - 1, 3), (2**63 + 1, 0)):
        expected = generator(seed, Purpose.RANDOM_POOL, 5, step, 0).integers(0, labels, size)
        pool = draw_pool(labels, size, seed=seed, epoch=5, step=step)
        np.testing.assert_array_equal(pool, expected)


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
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
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
