"""`extremis ablate`."""

from os import fspath
from typing import Any

from extremis.command import Progress, changes, command
from extremis.commands.shared import Names, Place, Settings


@command()
def ablate(
    data: Place,
    out: Place,
    *,
    recipes: Names = (),
    set: Settings = (),
    split: str = "test",
    retry: bool = False,
    progress: Progress = True,
) -> dict[str, Any]:
    """Train several recipes on DATA, compare the results, and write runs and comparison to OUT.

    Finished runs are skipped, and interrupted runs continue. The comparison is in ablation.json, ablation.md and, with
    the extra report, ablation.html, which also shows metrics against time for recipes with a validation split. In a
    checkout of Extremis, papers/ contains recipes from papers and checks of the papers' claims.

    Options:
        recipes: Recipes to compare: names, TOML files, or folders of TOML files. Default: random,astra.
        split: Split to score.
        retry: Also retry failed runs.

    Examples:
      extremis ablate data/ runs/ablation --recipes random,astra,renee --set train.epochs=20
      extremis ablate data/ runs/timed --set train.minutes=10 --set train.epochs=40
      extremis ablate data/ runs/own --recipes astra,recipes/mine.toml --set validation.split=val
    """
    from extremis.ablation import ablate as train_and_compare
    from extremis.ablation import load_variants

    data = fspath(data)
    variants = load_variants(recipes or ("random", "astra"), data, changes(set))
    return train_and_compare(data, fspath(out), variants, split, retry)
