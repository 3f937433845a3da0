"""Recipes: frozen, typed, validated, saved with a run. One TOML file a recipe, changed by `--set a.b=c`."""

from trainer.config.load import (
    check_keys,
    dump_config,
    load_config,
    load_recipe,
    lost_options,
    recipe_names,
    restore_recipe,
    stated_options,
    validate,
)
from trainer.config.merging import flatten
from trainer.methods.astra import Negatives
from trainer.methods.kinds import EncoderSection, LossSection
from trainer.methods.recipe import ClassifierRecipe, Recipe
from trainer.methods.sections import Classifier, Data, Train, Validation
from trainer.methods.tables import LEAD

__all__ = [
    "LEAD",
    "Classifier",
    "ClassifierRecipe",
    "Data",
    "EncoderSection",
    "LossSection",
    "Negatives",
    "Recipe",
    "Train",
    "Validation",
    "check_keys",
    "dump_config",
    "flatten",
    "load_config",
    "load_recipe",
    "lost_options",
    "recipe_names",
    "restore_recipe",
    "stated_options",
    "validate",
]
