"""`extremis ablate`."""

from typing import Any

import click

from extremis.commands.options import comma_list, output_options, set_option

_NAMES = comma_list(str, "names with commas between, for example astra,renee")


@click.command()
@click.argument("data")
@click.argument("out")
@click.option(
    "--table",
    type=click.Choice(["5", "6", "7", "8", "dexml-3", "dexml-4", "mips-1", "mips-2", "mips-table-2", "lns-4"]),
    default="5",
    help="ASTRA's: 5 strategies, 6 hard and random negatives, 7 first epoch with a table, 8 epochs between tables. "
    "DEXML's: dexml-3 mined negatives per query, dexml-4 losses. Of MIPS-s: mips-1 the hardest negatives from "
    "scratch, mips-2 count and age of negatives from an index (figures 1 and 2), mips-table-2 a few of them among "
    "uniform ones. Of LNS: lns-4 ways to choose a softmax's negatives.",
)
@click.option("--recipes", type=_NAMES, metavar="NAME,...", help="Recipes to compare instead of those of a table.")
@click.option("--only", type=_NAMES, metavar="NAME,...", help="Lines of the comparison to train. Default: all.")
@set_option
@click.option("--split", default="test")
@click.option("--retry", is_flag=True, help="Continue what failed before.")
@output_options
def ablate(data: str, out: str, split: str, retry: bool, **options: Any) -> dict[str, Any]:
    """Train several recipes on DATA under OUT and compare them: tables and figures of the papers as a command.

    A recipe that is finished already is not trained again, and one that was cut off continues. OUT gets ablation.json,
    ablation.md and, with the extra report, ablation.html: metrics against time where recipes have a validation split.

    \b
    Examples:
      extremis ablate data/ runs/ablation --set train.epochs=20
      extremis ablate data/ runs/timed --set train.minutes=10 --set train.epochs=40
      extremis ablate data/ runs/ablation --table 8
      extremis ablate data/ runs/losses --table dexml-4 --only softmax,decoupled-softmax
      extremis ablate data/ runs/ablation --recipes astra,renee,lns,mips-s --set validation.split=val
    """
    from extremis.ablation.ablate import ablate as train_and_compare
    from extremis.ablation.comparisons import variants_of

    return train_and_compare(data, out, *variants_of(data, **options), split, retry)
