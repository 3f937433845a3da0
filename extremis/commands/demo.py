"""`extremis demo`."""

from typing import Any

import click

from extremis.commands.options import output_options, set_option


@click.command()
@click.argument("folder", metavar="[DIR]", default="demo")
@click.option("--recipe", default="auto", help="auto, or a recipe's name or TOML file.")
@set_option
@output_options
def demo(folder: str, recipe: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Run the whole loop on the Tate collection: shard, choose a recipe, train, mine beside it, join, evaluate.

    Writes DIR (default: demo).

    \b
    Example:
      extremis demo demo/
      extremis demo demo/ --recipe astra
    """
    from extremis.whole_loop import demo as run_demo

    return run_demo(folder, recipe, overrides)
