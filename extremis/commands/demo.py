"""`extremis demo`."""

from typing import Any

import click

from extremis.commands.options import json_option, recipe_option, set_option


@click.command()
@click.argument("folder", metavar="[DIR]", default="demo")
@recipe_option
@set_option
@json_option
def demo(folder: str, recipe: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Run the whole loop on the Tate collection: shard, train, mine beside it, join, evaluate.

    Writes DIR (default: demo).

    \b
    Example:
      extremis demo demo/
    """
    from extremis.demo import demo as run_demo

    return run_demo(folder, recipe, overrides)
