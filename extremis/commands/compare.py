"""`extremis recipes`, `ablate` and `demo`: what ships, compared and shown."""

from typing import Any

import click

from extremis.commands.options import json_option, parse_names
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

    found = {name: load_recipe(name) for name in recipe_names()}
    rows = [
        [name, r.head.kind, r.loss.kind, str(r.negatives.hard), _random_of(r), str(r.train.epochs)]
        for name, r in found.items()
    ]
    table("recipes", ["name", "head", "loss", "hard", "random", "epochs"], rows)
    if as_json:
        print_json({name: recipe.model_dump(mode="json") for name, recipe in found.items()})


def _random_of(recipe: Any) -> str:
    return "all labels" if recipe.negatives.pool == "all" else f"{recipe.negatives.random} {recipe.negatives.pool}"


@click.command()
@click.argument("data")
@click.argument("out")
@click.option(
    "--table",
    "number",
    type=click.Choice(["5", "6", "7", "8", "dexml-3", "dexml-4", "mips-1", "mips-2", "lns-4"]),
    default="5",
    show_default=True,
    help="ASTRA's: 5 strategies, 6 hard and random negatives, 7 first epoch with a table, 8 epochs between tables. "
    "DEXML's: dexml-3 mined negatives a query, dexml-4 losses. Figures of MIPS-s: mips-1 the hardest negatives from "
    "scratch, mips-2 how many of them from an index how old. Of LNS: lns-4 ways to choose a softmax's negatives.",
)
@click.option("--recipes", "names", help="These instead, with commas between. Default: the strategies of Table 5.")
@click.option("--only", help="These lines of the comparison alone, by name, with commas between.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change every recipe.")
@click.option("--split", default="test", show_default=True)
@click.option("--retry", is_flag=True, help="Go on with what failed before.")
@json_option
def ablate(
    data: str,
    out: str,
    number: str,
    names: str | None,
    only: str | None,
    overrides: tuple[str, ...],
    split: str,
    retry: bool,
    as_json: bool,
) -> None:
    """Train several recipes on DATA under OUT and compare them: tables and figures of the papers as a command.

    A recipe that is finished already is not trained again, and one that was cut off goes on. OUT gets ablation.json,
    ablation.md and, with the extra report, ablation.html: metrics against time where recipes have a validation split.

    \b
    Examples:
      extremis ablate data/ runs/ablation --set train.epochs=20
      extremis ablate data/ runs/timed --set train.minutes=10 --set train.epochs=40
      extremis ablate data/ runs/ablation --table 8
      extremis ablate data/ runs/losses --table dexml-4 --only softmax,decoupled-softmax
      extremis ablate data/ runs/ablation --recipes astra,renee,lns,mips-s --set validation.split=val
    """
    from extremis.ablation.ablate import ablate as ablate_variants
    from extremis.ablation.comparisons import COMPARISONS, SHOWN, chosen, strategies

    if names is None:
        comparison = COMPARISONS[number]
        variants, shown = comparison.variants(data, overrides), comparison.shown
    else:
        variants, shown = strategies(parse_names("--recipes", names), overrides), SHOWN
    if only is not None:
        variants = chosen(variants, parse_names("--only", only))
    report = ablate_variants(data, out, variants, split, retry, shown)
    if as_json:
        print_json(report)


@click.command()
@click.argument("folder", metavar="[DIR]", default="demo")
@click.option("--recipe", default="astra", show_default=True)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the recipe.")
@json_option
def demo(folder: str, recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """The whole loop on the Tate collection: shard, train, mine beside it, join, evaluate. Writes DIR (default: demo).

    \b
    Example:
      extremis demo demo/
    """
    from extremis.demo import demo as run_demo

    report = run_demo(folder, recipe, overrides)
    if as_json:
        print_json(report)
