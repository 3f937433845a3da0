"""The course from random negatives to hard ones."""

import pytest

from trainer.config import Recipe, load_recipe
from trainer.negatives.curriculum import Mixture, mixtures


def recipe(**negatives: object) -> Recipe:
    return Recipe.model_validate(
        {"negatives": negatives, "refresh": {"start": 2, "every": 1}, "train": {"epochs": 6}},
    )


def test_without_a_curriculum_every_epoch_is_alike() -> None:
    assert mixtures(recipe(hard=4, random=10)) == (Mixture(4, 10),) * 6


def test_as_many_negatives_in_every_epoch() -> None:
    found = mixtures(recipe(hard=8, random=12, curriculum=True))
    assert found == ((0, 20), (0, 20), (2, 18), (4, 16), (6, 14), (8, 12))


def test_from_a_warm_up_to_hard_ones_alone() -> None:
    found = mixtures(recipe(hard=2, random=0, warmup=40, curriculum=True))
    assert found == ((0, 40), (0, 40), (1, 30), (1, 20), (2, 10), (2, 0))


@pytest.mark.parametrize("name", ["curriculum", "theta-curriculum"])
def test_the_recipes(name: str) -> None:
    found = mixtures(load_recipe(name))
    assert {sum(mixture) for mixture in found} == {3240}
    hard = [mixture.hard for mixture in found]
    assert hard == sorted(hard)
    assert (hard[2], hard[-1]) == (0, 200)
