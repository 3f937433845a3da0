"""`extremis recipes`."""

from typing import Any

import click

from extremis.commands.options import output_options
from extremis.console import table

_KINDS = {"head": "classifier", "loss": "bce"}  # where a recipe does not say
_SHOWN = (
    ("negatives", "hard", 0),
    ("negatives", "random", 3200),
    ("negatives", "pool", "shared"),
    ("train", "epochs", 20),
)


@click.command()
@output_options
def recipes() -> dict[str, Any]:
    """List the recipes that ship with Extremis.

    \b
    Example:
      extremis recipes
    """
    from trainer.config import recipe_names, stated_options

    by_name = {name: stated_options(name) for name in recipe_names()}
    rows = []
    for name, recipe in by_name.items():
        stated = {key: recipe.get(section, {}).get(key, default) for section, key, default in _SHOWN}
        kinds = [recipe.get(section, {}).get("kind", default) for section, default in _KINDS.items()]
        stated["random"] = _describe_pool(stated["random"], stated["pool"])
        rows.append([name, *kinds, *(str(stated[key]) for key in ("hard", "random", "epochs"))])
    table("recipes", ["name", "head", "loss", "hard", "random", "epochs"], rows)
    return by_name


def _describe_pool(random: int | str, pool: str) -> str:
    if pool == "all":
        return "all labels"
    return str(random) if pool == "auto" else f"{random} {pool}"
