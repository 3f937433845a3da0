"""Recipes of the release before there were methods, as its runs saved them: read, and with the numbers of today's."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import InputError
from tests.recipes import RECIPES
from trainer.config.load import load_recipe, read_recipe, removed_options, restore_recipe
from trainer.config.merging import flatten
from trainer.methods.rules import DataStatistics
from trainer.settings.resolve import apply_rules
from trainer.setup import require_same_recipe

# As the saved recipes were resolved for.
WORDNET = DataStatistics(82_398, 100_922, 100_000, 100_922, 300_000, 14.0, 1.0)
SAVED = json.loads((Path(__file__).parent / "earlier_recipes.json").read_text())  # others as changes of astra's
# Keys that came since, with what they were without.
LATER = {
    "order.batches": "mixed",
    "data.mix_by": "rows",
    "data.temperature": 0.0,
    "encoder.pretrained": "",
    "encoder.dense_weight": 1.0,
    "encoder.relu": False,
    "train.graph": False,
    "classifier.products": "tf32",
}


def saved(name: str) -> dict[str, Any]:
    """Return the config of a run of the recipe `name`, thirteen sections with all of their keys."""
    body: dict[str, Any] = {}
    for dotted, value in {**SAVED["astra"], **SAVED[name]}.items():
        *sections, key = dotted.split(".")
        inner = body
        for section in sections:
            inner = inner.setdefault(section, {})
        if value != "gone":
            inner[key] = value
    return body


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_recipe_comes_back_with_its_numbers(name: str) -> None:
    recipe = restore_recipe(saved(name), "run")
    before = LATER | flatten(saved(name))
    changed = {key: value for key, value in flatten(recipe.model_dump(mode="json")).items() if before.get(key) != value}
    assert {*changed} <= {"name", "method"}
    assert removed_options(saved(name), recipe) == []
    path = RECIPES.get(name.replace("+", "-"))
    if path:
        facts = WORDNET if recipe.data.label_texts else replace(WORDNET, label_texts=0)
        today = apply_rules(read_recipe(path), facts, name).recipe
        assert today.model_copy(update={"name": recipe.name}) == recipe


@pytest.mark.parametrize(
    ("name", "section", "changes", "lost"),
    [
        ("astra", "negatives", {"in_batch": {"hard": 4}}, ["negatives.in_batch.hard = 4"]),
        ("astra", "order", {"tail": "drop"}, ["order.tail = 'drop'"]),
        ("lns", "negatives", {"hard": 5}, ["negatives.hard = 5"]),
        ("astra", "order", {"cluster": 16}, ["order.cluster = 16"]),
    ],
)
def test_a_run_by_removed_options_is_read_and_does_not_go_on_without_them(
    name: str, section: str, changes: dict[str, Any], lost: list[str]
) -> None:
    body = saved(name)
    body[section] |= changes
    recipe = restore_recipe(body, "run")
    assert removed_options(body, recipe) == lost
    with pytest.raises(InputError, match=f"run: this run was started with {re.escape(lost[0])}, which this version"):
        require_same_recipe(body, recipe, recipe, "run")
    require_same_recipe(saved(name), recipe, recipe, "run")


@pytest.mark.parametrize(
    ("base", "overrides", "method"),
    [
        ("astra", ["negatives.pool=all", "negatives.hard=0"], "renee"),
        ("astra", ["negatives.lsh.hard=all"], "lns"),
        ("lns", ["negatives.lsh.hard=0"], "astra"),
        ("astra", ["head.kind=label-encoder", "negatives.pool=all"], "dexml"),
        ("dexml", ["negatives.pool=batch", "order.cluster=4", "data.label_texts=false"], "ngame"),
        ("ngame", ["head.kind=classifier", "classifier.normalize=true", "classifier.initial_scale=1.0"], "ngame-m2"),
        ("renee", ["negatives.pool=shared"], "astra"),
    ],
)
def test_keys_that_chose_a_method_still_do(base: str, overrides: list[str], method: str) -> None:
    assert load_recipe(base, overrides).method == method


def test_an_own_name_is_no_method(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('extends = "astra"\nmethod = "mine"\n')
    with pytest.raises(InputError, match=r"method = 'mine': expected one of .*; name a recipe with the key `name`"):
        load_recipe(str(path))
    assert restore_recipe({"method": "mine"}, "run").name == "mine"
