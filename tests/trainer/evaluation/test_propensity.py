"""Inverse propensities against napkinXC and the formula's own numbers."""

import math

import numpy as np
import pytest
from napkinxc.metrics import Jain_et_al_inverse_propensity

from schemas.errors import InputError
from trainer.evaluation.evaluate import inverse_propensity


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.4), (0.55, 1.5), (0.6, 2.6)])
def test_equals_napkinxc(a: float, b: float) -> None:
    generator = np.random.default_rng(0)
    train = generator.random((300, 20)) < generator.random(20)
    weights = inverse_propensity(train.sum(axis=0), len(train), a, b)
    np.testing.assert_allclose(weights, Jain_et_al_inverse_propensity(train.astype(int), A=a, B=b), rtol=1e-12)


def test_natural_logarithm_by_hand() -> None:
    expected = 1 + (math.log(1000) - 1) * 2.5**0.55 * (7 + 1.5) ** -0.55
    assert inverse_propensity(np.array([7]), 1000, 0.55, 1.5)[0] == pytest.approx(expected, rel=1e-12)


def test_rare_labels_weigh_more() -> None:
    weights = inverse_propensity(np.array([0, 1, 10, 100]), 100, 0.55, 1.5)
    assert weights.dtype == np.float64
    assert (np.diff(weights) < 0).all()


@pytest.mark.parametrize(("frequency", "points"), [([1], 0), ([11], 10), ([-1], 10)])
def test_impossible_counts_are_refused(frequency: list[int], points: int) -> None:
    with pytest.raises(InputError, match="train split"):
        inverse_propensity(np.array(frequency), points, 0.55, 1.5)
