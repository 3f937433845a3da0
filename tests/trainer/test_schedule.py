"""The learning rate's course."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.schedule import rate_factor

DECAYS = ("cosine", "linear")


def course(steps: int, warmup: float, final: float, decay: str = "cosine") -> list[float]:
    return [rate_factor(step, steps, warmup, final, decay) for step in range(steps)]


@given(st.integers(1, 200), st.floats(0, 0.99), st.floats(0, 1), st.sampled_from(DECAYS))
def test_it_rises_then_falls_within_0_and_1(steps: int, warmup: float, final: float, decay: str) -> None:
    factors = course(steps, warmup, final, decay)
    assert all(0 < factor <= 1 or (factor == 0 == final) for factor in factors)
    peak = factors.index(max(factors))
    assert all(low < high for low, high in itertools.pairwise(factors[: peak + 1]))
    assert all(high >= low for high, low in itertools.pairwise(factors[peak:]))
    assert abs(peak - warmup * steps) <= 2


def test_the_cosine_between_full_and_final() -> None:
    factors = course(101, 0.01, 0.2)
    assert factors[2] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * (2 - 1.01) / (101 - 1.01))))
    assert factors[51] == pytest.approx(0.6, abs=0.01)
    assert factors[-1] == pytest.approx(0.2, abs=0.01)


@given(st.integers(2, 200), st.floats(0, 0.9), st.floats(0, 1))
def test_a_linear_decay_loses_as_much_in_every_step(steps: int, warmup: float, final: float) -> None:
    rising = max(1.0, warmup * steps)
    factors = course(steps, warmup, final, "linear")
    for step in range(math.ceil(rising), steps):
        assert factors[step] == pytest.approx(1 - (1 - final) * (step - rising) / max(1.0, steps - rising))
