"""Inverse propensities against napkinXC and the formula's own numbers."""

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


@pytest.mark.parametrize(("frequency", "points"), [([1], 0), ([11], 10), ([-1], 10)])
def test_impossible_counts_are_refused(frequency: list[int], points: int) -> None:
    with pytest.raises(InputError, match="train split"):
        inverse_propensity(np.array(frequency), points, 0.55, 1.5)
