"""Recipes: frozen, typed, validated, saved with a run. One TOML file a recipe, changed by `--set a.b=c`."""

from trainer.config.load import (
    check_keys,
    dump_config,
    load_config,
    load_recipe,
    lost_options,
    read_recipe,
    recipe_names,
    restore_recipe,
    validate,
)
from trainer.config.merging import flatten
from trainer.methods.astra import Negatives
from trainer.methods.recipe import ClassifierRecipe, Recipe

__all__ = [
    "ClassifierRecipe",
    "Negatives",
    "Recipe",
    "check_keys",
    "dump_config",
    "flatten",
    "load_config",
    "load_recipe",
    "lost_options",
    "read_recipe",
    "recipe_names",
    "restore_recipe",
    "validate",
]
