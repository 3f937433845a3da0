"""`extremis recipes`."""

import click

from extremis.commands.options import json_option
from extremis.console import print_json, table


@click.command()
@json_option
def recipes(as_json: bool) -> None:
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
    if as_json:
        print_json({name: recipe.model_dump(mode="json") for name, recipe in by_name.items()})
