"""`extremis demo`."""

import click

from extremis.commands.options import json_option, recipe_option, set_option
from extremis.console import print_json


@click.command()
@click.argument("folder", metavar="[DIR]", default="demo")
@recipe_option
@set_option
@json_option
def demo(folder: str, recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Run the whole loop on the Tate collection: shard, train, mine beside it, join, evaluate.

    Writes DIR (default: demo).

    \b
    Example:
      extremis demo demo/
    """
    from extremis.demo import demo as run_demo

    report = run_demo(folder, recipe, overrides)
    if as_json:
        print_json(report)
