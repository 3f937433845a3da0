"""`extremis ablate`."""

from os import fspath
from typing import Any, Literal

from extremis.command import Progress, changes, command
from extremis.commands.shared import Names, Place, Settings


@command()
def ablate(
    data: Place,
    out: Place,
    *,
    table: Literal["5", "6", "7", "8", "dexml-3", "dexml-4", "mips-1", "mips-2", "mips-table-2", "lns-4"] = "5",
    recipes: Names | None = None,
    only: Names | None = None,
    set: Settings = (),
    split: str = "test",
    retry: bool = False,
    progress: Progress = True,
) -> dict[str, Any]:
    """Train several recipes on DATA under OUT and compare them: tables and figures of the papers as a command.

    A recipe that is finished already is not trained again, and one that was cut off continues. OUT gets ablation.json,
    ablation.md and, with the extra report, ablation.html: metrics against time where recipes have a validation split.

    Options:
        table: ASTRA's: 5 strategies, 6 hard and random negatives, 7 first epoch with a table, 8 epochs between tables.
            DEXML's: dexml-3 mined negatives per query, dexml-4 losses. Of MIPS-s: mips-1 the hardest negatives from
            scratch, mips-2 count and age of negatives from an index (figures 1 and 2), mips-table-2 a few of them among
            uniform ones. Of LNS: lns-4 ways to choose a softmax's negatives.
        recipes: Recipes to compare instead of those of a table.
        only: Lines of the comparison to train. Default: all.
        split: Split to score.
        retry: Continue what failed before.

    Examples:
      extremis ablate data/ runs/ablation --set train.epochs=20
      extremis ablate data/ runs/timed --set train.minutes=10 --set train.epochs=40
      extremis ablate data/ runs/ablation --table 8
      extremis ablate data/ runs/losses --table dexml-4 --only softmax,decoupled-softmax
      extremis ablate data/ runs/ablation --recipes astra,renee,lns,mips-s --set validation.split=val
    """
    from extremis.ablation.ablate import ablate as train_and_compare
    from extremis.ablation.comparisons import variants_of

    data = fspath(data)
    variants = variants_of(data, table=table, recipes=recipes, only=only, overrides=changes(set))
    return train_and_compare(data, fspath(out), *variants, split, retry)
