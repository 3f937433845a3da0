"""`extremis recipes`."""

from typing import Any

import click

from extremis.commands.options import json_option
from extremis.console import table


@click.command()
@json_option
def recipes() -> dict[str, Any]:
    """List the recipes that ship with Extremis.

    \b
    Example:
      extremis recipes
    """
    from trainer.config import load_recipe, recipe_names

    by_name = {name: load_recipe(name) for name in recipe_names()}
    rows = []
    for name, recipe in by_name.items():
        negatives = recipe.negatives
        random = "all labels" if negatives.pool == "all" else f"{negatives.random} {negatives.pool}"
        rows.append([name, recipe.head.kind, recipe.loss.kind, str(negatives.hard), random, str(recipe.train.epochs)])
    table("recipes", ["name", "head", "loss", "hard", "random", "epochs"], rows)
    return {name: recipe.model_dump(mode="json") for name, recipe in by_name.items()}
