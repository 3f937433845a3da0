"""Draws are functions of seed, purpose and counters, and of nothing else."""

import itertools

import numpy as np
import pytest
import torch

from schemas.randomness import Purpose, generator, torch_seed
from trainer.device import torch_generator


def draws(*key, size: int = 4) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    return tuple(generator(*key).integers(0, 2**63, size).tolist())


def test_a_draw_does_not_depend_on_earlier_draws() -> None:
    expected = draws(1, Purpose.WINDOW, 2, 3, 4)
    generator(1, Purpose.WINDOW, 2, 3, 3).random(1000)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    assert draws(1, Purpose.WINDOW, 2, 3, 4) == expected


def test_seeds_purposes_and_counters_are_apart() -> None:
    keys = list(itertools.product([0, 1, 2**40], Purpose, range(3), range(3), range(3)))
    assert len({draws(*key) for key in keys}) == len(keys)
    # One stream is not a later part of another, as counters that run into each other would make it.
    many = {value for counter in range(8) for value in draws(0, Purpose.RANDOM_POOL, 0, counter, size=2000)}
    assert len(many) == 8 * 2000


def test_neighbouring_counters_are_uncorrelated() -> None:
    columns = np.stack([generator(7, Purpose.DROPOUT, 0, step).random(4000) for step in range(6)])
    off = np.corrcoef(columns) - np.eye(6)
    assert np.abs(off).max() < 5 / np.sqrt(4000)  # 15 pairs at five standard errors: one in 100,000
    np.testing.assert_allclose(columns.mean(1), 0.5, atol=5 * np.sqrt(1 / 12 / 4000))


def test_torch_is_keyed_in_the_same_way() -> None:
    def rand(*key) -> list[float]:  # type: ignore[no-untyped-def]
        return torch.rand(3, generator=torch_generator(*key)).tolist()

    assert rand(0, Purpose.DROPOUT, 1, 2) == rand(0, Purpose.DROPOUT, 1, 2)
    keys = itertools.product([0, 1], [Purpose.DROPOUT, Purpose.MODEL_DROPOUT], range(3), range(3))
    seeds = [torch_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_an_unknown_purpose_and_a_fourth_counter_are_refused() -> None:
    with pytest.raises(ValueError, match="99 is not a valid Purpose"):
        generator(0, 99)
    with pytest.raises(ValueError, match="at most three counters"):
        generator(0, Purpose.WINDOW, 1, 2, 3, 4)
