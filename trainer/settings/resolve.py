"""Choose the options that are "auto" in a recipe, and warn about settings that do not suit the data."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.layout import DataLayout
from trainer.config.load import read_recipe, validate
from trainer.config.merging import flatten, options_left_to_data, with_values, without_auto
from trainer.methods import rules
from trainer.methods.recipe import ClassifierRecipe, Recipe
from trainer.methods.rules import DataStatistics, FromData, Setting, log_odds
from trainer.settings.data_statistics import measure
from trainer.settings.versions import EarlierRun, settings_of_refresh, settings_of_validation

_FAR_BIAS = 1.0  # distance from the prior: half of the distance at which P@1 is halved


@dataclass(frozen=True)
class Resolved:
    """A recipe, and its settings that were chosen from the data, by dotted key."""

    recipe: Recipe
    settings: dict[str, Setting] = field(default_factory=dict)

    def lines(self, data: str) -> list[str]:
        """Return lines with the settings and their reasons, and with warnings for DATA. Raises TableError."""
        if self.recipe.data.mix:
            return []
        return [*self.reasons, *(f"odd: {line}" for line in odd_settings(self.recipe, measure_rows(self.recipe, data)))]

    @property
    def reasons(self) -> list[str]:
        """Return lines with the settings and their reasons."""
        return [f"{key} = {setting.value} ({setting.reason})" for key, setting in self.settings.items()]


def resolve(source: str, overrides: Iterable[str], data: str) -> Resolved:
    """Read the recipe `source` with `overrides`, and compute its settings from DATA.

    Raises the errors of `load_recipe`, InputError if an option without a rule is "auto", and TableError.
    """
    overrides = list(overrides)
    body = read_recipe(source, overrides)
    run = body.get("train", {}).get("start_from")
    earlier = EarlierRun.open(data, run) if run else None
    earlier_settings = (
        earlier.settings_of_model(options_left_to_data(body)) | earlier.settings_of_holdout(body) if earlier else {}
    )
    body = with_values(body, values_of(earlier_settings))
    if options_left_to_data(body):
        resolved = apply_rules(body, measure_rows(validate(without_auto(body), source), data), source)
    else:
        resolved = Resolved(validate(body, source))
    settings = settings_of_validation(resolved.recipe, data, body)
    if earlier is not None:
        earlier.require_unseen(resolved.recipe)
        settings |= settings_of_refresh(resolved.recipe, data, earlier, overrides)
    if not settings | earlier_settings:
        return resolved
    recipe = validate(with_values(resolved.recipe.model_dump(), values_of(settings)), source)
    return Resolved(recipe, {**earlier_settings, **resolved.settings, **settings})


def values_of(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the values of `settings` by dotted key."""
    return {key: setting.value for key, setting in settings.items()}


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
    if statistics.points < recipe.order.batch * 10 and recipe.order.batch > int(rules.batch(statistics, {}).value):
        steps = math.ceil(statistics.points / recipe.order.batch)
        yield (
            f"order.batch = {recipe.order.batch} gives only {steps} steps in an epoch of "
            f"{statistics.described_points}: set it to 'auto'"
        )


def apply_rules(body: dict[str, Any], statistics: DataStatistics, source: str) -> Resolved:
    """Apply the rules for options in a recipe's `body` that are left to the data. Raises InputError."""
    resolved_options = _ResolvedOptions(
        options_left_to_data(body), statistics, flatten(validate(without_auto(body), source).model_dump())
    )
    for key in resolved_options.rules:
        resolved_options[key]
    return Resolved(
        validate(with_values(body, values_of(resolved_options.settings)), source), resolved_options.settings
    )


class _ResolvedOptions(Mapping[str, Any]):
    """Options of a recipe by dotted key: explicit options (`stated`), and options that `rules` compute on demand."""

    def __init__(self, rules: Mapping[str, FromData], statistics: DataStatistics, stated: Mapping[str, Any]) -> None:
        self.rules, self.settings = rules, dict[str, Setting]()
        self._statistics, self._stated = statistics, stated

    def __getitem__(self, key: str) -> Any:
        if key not in self.rules:
            return self._stated[key]
        if key not in self.settings:
            self.settings[key] = self.rules[key].rule(self._statistics, self)
        return self.settings[key].value

    def __iter__(self) -> Iterator[str]:
        return iter({*self.rules, *self._stated})

    def __len__(self) -> int:
        return len({*self.rules, *self._stated})
