"""Recipes: frozen, typed, validated, saved with a run. One TOML file a method, changed by `--set a.b=c`."""

from trainer.config.classifier import Classifier
from trainer.config.encoder import EncoderSection
from trainer.config.load import (
    check_keys,
    dump_config,
    load_config,
    load_recipe,
    recipe_names,
    restore_recipe,
    stated_options,
    validate,
)
from trainer.config.loss import LossSection
from trainer.config.recipe import Recipe
from trainer.config.refresh import LEAD
from trainer.config.train import Train
from trainer.config.validation import Validation
from trainer.negatives.section import Negatives

__all__ = [
    "LEAD",
    "Classifier",
    "EncoderSection",
    "LossSection",
    "Negatives",
    "Recipe",
    "Train",
    "Validation",
    "check_keys",
    "dump_config",
    "load_config",
    "load_recipe",
    "recipe_names",
    "restore_recipe",
    "stated_options",
    "validate",
]
