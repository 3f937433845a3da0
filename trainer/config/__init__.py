"""Recipes: frozen, typed, validated, saved with a run. One TOML file a method, changed by `--set a.b=c`."""

from trainer.config.checkpoint import Checkpoint
from trainer.config.classifier import Classifier
from trainer.config.data import Data
from trainer.config.encoder import EncoderSection
from trainer.config.head import HeadSection
from trainer.config.load import dump_config, load_config, load_recipe, recipe_names, restore_recipe, validate
from trainer.config.logging import Logging
from trainer.config.loss import LossSection
from trainer.config.order import Order
from trainer.config.recipe import Recipe
from trainer.config.refresh import LEAD, Refresh
from trainer.config.storage import Storage
from trainer.config.train import Train
from trainer.config.validation import Validation
from trainer.negatives.section import Negatives

__all__ = [
    "LEAD",
    "Checkpoint",
    "Classifier",
    "Data",
    "EncoderSection",
    "HeadSection",
    "Logging",
    "LossSection",
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
    "restore_recipe",
    "validate",
]
