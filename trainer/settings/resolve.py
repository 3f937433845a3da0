"""Recipes with the numbers that they leave to the data filled in."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import InputError
from schemas.layout import DataLayout
from trainer.config import Recipe, validate
from trainer.config.load import auto_keys, read_recipe, without_auto
from trainer.settings.facts import Facts, measure
from trainer.settings.oddities import odd_settings
from trainer.settings.rules import RULES, Setting


@dataclass(frozen=True)
class Resolved:
    """A recipe, and the numbers in it that came from the data, by dotted key."""

    recipe: Recipe
    settings: dict[str, Setting] = field(default_factory=dict)

    def lines(self, data: str) -> list[str]:
        """Say what was set and why, and what of the recipe is odd for DATA, a line each. Raises TableError."""
        set_lines = [f"{key} = {setting.value} ({setting.reason})" for key, setting in self.settings.items()]
        return [*set_lines, *(f"odd: {line}" for line in odd_settings(self.recipe, facts_of(self.recipe, data)))]


def resolve(source: str, overrides: Iterable[str], data: str) -> Resolved:
    """Read the recipe `source` with `overrides`, and derive from DATA the numbers that it leaves to the data.

    Raises InputError: as `load_recipe`, or a number without a rule is "auto"; TableError.
    """
    body = read_recipe(source, overrides)
    keys = auto_keys(body)
    for key in keys:
        if key not in RULES:
            raise InputError(
                f"recipe {source}: {key} = 'auto': expected a number. Those that the data can decide are "
                f"{', '.join(RULES)}."
            )
    if not keys:
        return Resolved(validate(body, source))
    return derive(body, facts_of(validate(without_auto(body), source), data), source)


def facts_of(recipe: Recipe, data: str) -> Facts:
    """Measure the rows that a recipe trains on. Raises InputError, TableError."""
    rows = recipe.data
    return measure(DataLayout(data), rows.split, rows.trained, rows.label_texts)


def derive(body: dict[str, Any], facts: Facts, source: str) -> Resolved:
    """Fill in the numbers that a recipe's `body` leaves to the data by their rules. Raises InputError."""
    settings = {key: RULES[key](facts) for key in auto_keys(body)}
    filled = {name: dict(options) if isinstance(options, dict) else options for name, options in body.items()}
    for key, setting in settings.items():
        section, _, option = key.partition(".")
        filled[section][option] = setting.value
    return Resolved(validate(filled, source), settings)
