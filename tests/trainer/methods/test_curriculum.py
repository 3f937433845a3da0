"""The course from random negatives to hard ones."""

import pytest

from tests.recipes import RECIPES
from trainer.methods.astra import Astra
from trainer.methods.settling import DataStatistics
from trainer.recipe_files import read_recipe
from trainer.settings.resolve import Resolved


def test_as_many_negatives_in_every_epoch() -> None:
    negatives = {"hard": 8, "random": 12, "curriculum": True}
    recipe = Astra.model_validate({"negatives": negatives, "refresh": {"start": 2}, "train": {"epochs": 6}})
    assert recipe.negative_counts() == ((0, 20), (0, 20), (2, 18), (4, 16), (6, 14), (8, 12))


@pytest.mark.parametrize("name", ["curriculum", "theta-curriculum"])
def test_the_recipes(name: str) -> None:
    facts = DataStatistics(queries=52_611, labels=15_562, pairs=323_625, label_texts=15_562)  # Tate's
    recipe = Resolved.of(read_recipe(RECIPES[name]), facts, name).recipe
    epochs = recipe.negative_counts()
    assert {sum(mixture) for mixture in epochs} == {3240}
    hard = [hard for hard, _ in epochs]
    assert hard == sorted(hard)
    assert (hard[2], hard[-1]) == (0, 40)
