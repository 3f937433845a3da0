"""Recipes with the options that they leave to the data filled in."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import InputError
from schemas.layout import DataLayout
from trainer.config import Recipe, validate
from trainer.config.load import auto_keys, read_recipe, without_auto
from trainer.settings.facts import Facts, measure
from trainer.settings.oddities import odd_settings
from trainer.settings.refreshing import EarlierRun, settings_of_refresh
from trainer.settings.rules import RULES, Setting
from trainer.settings.validating import settings_of_validation


@dataclass(frozen=True)
class Resolved:
    """A recipe, and the options in it that came from the data, by dotted key."""

    recipe: Recipe
    settings: dict[str, Setting] = field(default_factory=dict)

    def lines(self, data: str) -> list[str]:
        """Say what was set and why, and what of the recipe is odd for DATA, a line each. Raises TableError."""
        if self.recipe.data.mix:
            return []
        return [*self.reasons, *(f"odd: {line}" for line in odd_settings(self.recipe, facts_of(self.recipe, data)))]

    @property
    def reasons(self) -> list[str]:
        """Say what was set and why, a line each."""
        return [f"{key} = {setting.value} ({setting.reason})" for key, setting in self.settings.items()]


def resolve(source: str, overrides: Iterable[str], data: str) -> Resolved:
    """Read the recipe `source` with `overrides`, and derive from DATA what it leaves to the data.

    Raises InputError: as `load_recipe`, or an option without a rule is "auto"; TableError.
    """
    overrides = list(overrides)
    body = read_recipe(source, overrides)
    run = body.get("train", {}).get("start_from")
    earlier = EarlierRun.open(data, run) if run else None
    taken = earlier.settings_of_model(_derived(body, source)) if earlier else {}
    body = _filled(body, taken)
    if _derived(body, source):
        resolved = derive(body, facts_of(validate(without_auto(body), source), data), source)
    else:
        resolved = Resolved(validate(body, source))
    settings = settings_of_validation(resolved.recipe, data, body)
    if earlier is not None:
        settings |= settings_of_refresh(resolved.recipe, data, earlier, overrides)
    if not settings:
        return resolved
    recipe = validate(_filled(resolved.recipe.model_dump(), settings), source)
    return Resolved(recipe, {**taken, **resolved.settings, **settings})


def _filled(body: dict[str, Any], settings: dict[str, Setting]) -> dict[str, Any]:
    """Return a recipe's `body` with `settings`."""
    filled = {name: dict(options) if isinstance(options, dict) else options for name, options in body.items()}
    for key, setting in settings.items():
        section, _, option = key.partition(".")
        filled[section][option] = setting.value
    return filled


def facts_of(recipe: Recipe, data: str) -> Facts:
    """Measure the rows that a recipe trains on. Raises InputError, TableError."""
    rows = recipe.data
    return measure(DataLayout(data), rows.split, rows.trained, rows.label_texts, rows.parts)


def derive(body: dict[str, Any], facts: Facts, source: str) -> Resolved:
    """Fill in the options that a recipe's `body` leaves to the data by their rules. Raises InputError."""
    open_keys, settings = _derived(body, source), dict[str, Setting]()
    stated = validate(without_auto(body), source).model_dump()
    settled: dict[str, Any] = {}
    for key, rule in RULES.items():
        section, _, option = key.partition(".")
        if key in open_keys:
            settings[key] = rule(facts, settled)
        settled[key] = settings[key].value if key in open_keys else stated[section].get(option)
    return Resolved(validate(_filled(body, settings), source), settings)


def _derived(body: dict[str, Any], source: str) -> set[str]:
    """Return the options that a recipe's `body` leaves to the data. Raises InputError for one without a rule."""
    keys = auto_keys(body)
    for key in keys:
        if key not in RULES:
            raise InputError(
                f"recipe {source}: {key} = 'auto': expected a value. What the data can decide: {', '.join(RULES)}."
            )
    return set(keys)
