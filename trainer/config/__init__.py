"""A recipe: frozen, typed, validated, saved with what it made. One TOML file a method, changed by `--set a.b=c`."""

from trainer.config.course import Checkpoint, Logging, Train, Validation
from trainer.config.data import LABEL_TEXTS, MOST_WEIGHT, Data, Order, Storage
from trainer.config.load import dump_config, load_config, load_recipe, recipe_names, validate
from trainer.config.model import Classifier, Encoder, Head, Loss
from trainer.config.negatives import LEAD, Hashing, Negatives, Refresh
from trainer.config.recipe import Recipe

__all__ = [
    "LABEL_TEXTS",
    "LEAD",
    "MOST_WEIGHT",
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
