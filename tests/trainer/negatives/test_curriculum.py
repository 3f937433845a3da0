"""The course from random negatives to hard ones."""

import pytest

from trainer.config import Negatives
from trainer.config.load import read_recipe
from trainer.negatives.curriculum import Mixture, mixtures
from trainer.settings.facts import Facts
from trainer.settings.resolve import derive


def course(**negatives: object) -> tuple[Mixture, ...]:
    return mixtures(Negatives.model_validate(negatives), epochs=6, start=2)


def test_without_a_curriculum_every_epoch_is_alike() -> None:
    assert course(hard=4, random=10) == (Mixture(4, 10),) * 6


def test_as_many_negatives_in_every_epoch() -> None:
    epochs = course(hard=8, random=12, curriculum=True)
    assert epochs == ((0, 20), (0, 20), (2, 18), (4, 16), (6, 14), (8, 12))


def test_from_a_warm_up_to_hard_ones_alone() -> None:
    epochs = course(hard=2, random=0, warmup=40, curriculum=True)
    assert epochs == ((0, 40), (0, 40), (1, 30), (1, 20), (2, 10), (2, 0))


@pytest.mark.parametrize("name", ["curriculum", "theta-curriculum"])
def test_the_recipes(name: str) -> None:
    facts = Facts(queries=52_611, labels=15_562, pairs=323_625, label_texts=15_562)  # Tate's
    recipe = derive(read_recipe(name), facts, name).recipe
    epochs = mixtures(recipe.negatives, recipe.train.epochs, recipe.refresh.start)
    assert {sum(mixture) for mixture in epochs} == {3240}
    hard = [mixture.hard for mixture in epochs]
    assert hard == sorted(hard)
    assert (hard[2], hard[-1]) == (0, 40)
