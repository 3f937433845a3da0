"""Choose the options that are "auto" in a recipe, and warn about settings that do not suit the data."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.layout import DataLayout
from trainer.methods.keys import flatten, merge
from trainer.methods.recipe import ClassifierRecipe, Recipe
from trainer.methods.settling import NOMINAL, DataStatistics, batch, log_odds, settle
from trainer.recipe_files import read_recipe, validate
from trainer.settings.data_statistics import measure
from trainer.settings.versions import EarlierRun, Setting, settings_of_refresh, settings_of_validation

_FAR_BIAS = 1.0  # distance from the prior: half of the distance at which P@1 is halved


@dataclass(frozen=True)
class Resolved:
    """A recipe of numbers, and why it has those that were chosen from the data, by dotted key."""

    recipe: Recipe
    why: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, body: Mapping[str, Any], statistics: DataStatistics, source: str) -> "Resolved":
        """Settle a recipe's `body` for data with these `statistics`. Raises InputError."""
        settled, why = settle(body, statistics)
        return cls(validate(settled, source), why)

    @property
    def settings(self) -> dict[str, Any]:
        """Values that were chosen from the data, by dotted key."""
        values = flatten(self.recipe.model_dump())
        return {key: values[key] for key in self.why if key in values}  # a kind that changed has fewer keys

    @property
    def reasons(self) -> list[str]:
        """Return lines with the settings and their reasons."""
        return [f"{key} = {value} ({self.why[key]})" for key, value in self.settings.items()]

    def lines(self, data: str) -> list[str]:
        """Return lines with the settings and their reasons, and with warnings for DATA. Raises TableError."""
        if self.recipe.data.mix:
            return []
        return [*self.reasons, *(f"odd: {line}" for line in odd_settings(self.recipe, measure_rows(self.recipe, data)))]


def resolve(source: str, overrides: Iterable[str], data: str) -> Resolved:
    """Read the recipe `source` with `overrides`, and settle it on DATA.

    Raises the errors of `load_recipe`, InputError if an option that no method settles is "auto", and TableError.
    """
    overrides, why = list(overrides), dict[str, str]()

    def put(settings: Mapping[str, Setting], body: Mapping[str, Any]) -> dict[str, Any]:
        for key, (value, reason) in settings.items():
            section, _, option = key.partition(".")
            body, why[key] = merge(body, {section: {option: value}}), reason
        return dict(body)

    body = read_recipe(source, overrides)
    resolved = Resolved.of(body, NOMINAL, source)
    if run := resolved.recipe.train.start_from:
        earlier = EarlierRun.open(data, run)
        body = put(earlier.settings_of_model(body, resolved.why), body)
        resolved = Resolved.of(body, NOMINAL, source)
    if resolved.why:  # it leaves something to the data
        resolved = Resolved.of(body, measure_rows(resolved.recipe, data), source)
    recipe, why = resolved.recipe, why | resolved.why
    settings = settings_of_validation(recipe, data, body)
    if run:
        earlier.require_unseen(recipe)
        settings |= settings_of_refresh(recipe, data, earlier, overrides)
    if settings:
        recipe = validate(put(settings, recipe.model_dump()), source)
    return Resolved(recipe, why)


def measure_rows(recipe: Recipe, data: str) -> DataStatistics:
    """Measure the rows that a recipe trains on. Raises InputError, TableError."""
    rows = recipe.data
    return measure(DataLayout(data), rows.split, rows.training_rows, rows.label_texts, rows.parts)


def odd_settings(recipe: Recipe, statistics: DataStatistics) -> Iterator[str]:
    """Yield a line for each setting that is probably a mistake for data with these `statistics`."""
    epochs, tables = recipe.train.epochs, recipe.tables
    start = tables.start if tables and not recipe.is_clustered else recipe.first_indexed_epoch
    if start is not None and start >= epochs:
        yield f"negatives.hard has no effect, because refresh.start = {start} is not below train.epochs = {epochs}"
    if isinstance(recipe, ClassifierRecipe) and recipe.classifier.bias and recipe.loss.kind == "bce":
        prior = log_odds(statistics.prior)
        distance = recipe.classifier.initial_bias - prior
        if abs(distance) > _FAR_BIAS:
            yield (
                f"classifier.initial_bias = {recipe.classifier.initial_bias:g} is {abs(distance):.1f} "
                f"{'above' if distance > 0 else 'below'} the prior of this data, {prior:.1f}: set it to 'prior'"
            )
    if statistics.points < recipe.order.batch * 10 and recipe.order.batch > batch(statistics):
        steps = math.ceil(statistics.points / recipe.order.batch)
        yield (
            f"order.batch = {recipe.order.batch} gives only {steps} steps in an epoch of "
            f"{statistics.described_points}: set it to 'auto'"
        )
