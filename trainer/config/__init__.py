"""A recipe: frozen, typed, validated, saved with what it made. One TOML file a method, changed by `--set a.b=c`."""

from trainer.config.data import Data, Order, Storage
from trainer.config.load import dump_config, load_config, load_recipe, recipe_names, validate
from trainer.config.model import Classifier, Encoder, Head, Loss
from trainer.config.negatives import LEAD, Hashing, Negatives, Refresh
from trainer.config.recipe import Recipe
from trainer.config.training import Checkpoint, Logging, Train, Validation

__all__ = [
    "LEAD",
    "Checkpoint",
    "Classifier",
    "Data",
    "Encoder",
    "Hashing",
    "Head",
    "Logging",
    "Loss",
    "Negatives",
    "Order",
    "Recipe",
    "Refresh",
    "Storage",
    "Train",
    "Validation",
    "dump_config",
    "load_config",
    "load_recipe",
    "recipe_names",
    "validate",
]
