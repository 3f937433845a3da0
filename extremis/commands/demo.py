"""`extremis demo`: the whole loop on the data set that ships with the project."""

import time
from collections.abc import Sequence
from os import fspath
from pathlib import Path
from typing import Annotated, Any

from extremis.command import Option, Progress, changes, command
from extremis.commands.shared import Place, Recipe, Settings
from extremis.console import metric_grid, results, say, table
from schemas.errors import InputError

AUTO = "auto"
# Scores of PECOS XR-Linear (pifa_lf_concat, TF-IDF of words and pairs of words) on the same test split.
XR_LINEAR = {"P@1": 70.81, "P@3": 58.59, "P@5": 48.71, "PSP@1": 24.31, "PSP@3": 34.24, "PSP@5": 40.51}


@command()
def demo(
    folder: Annotated[Place, Option(metavar="[DIR]")] = "demo",
    *,
    recipe: Recipe = AUTO,
    set: Settings = (),
    progress: Progress = True,
) -> dict[str, Any]:
    """Run the whole loop on the Tate collection: shard, choose a recipe, train with a miner, join, evaluate.

    The output is written to DIR (default: demo).

    Options:
        recipe: auto, or the name or TOML file of a recipe.

    Example:
      extremis demo demo/
      extremis demo demo/ --recipe astra
    """
    from extremis.evaluation import evaluate
    from pipelines.options import ShardOptions
    from pipelines.shard import shard
    from schemas import storage
    from schemas.owners import require_output_folder
    from schemas.storage import join
    from trainer.config.load import load_recipe

    recipe, overrides = fspath(recipe), changes(set)
    data, run = join(fspath(folder), "data"), join(fspath(folder), "run")
    raw = _example()
    if recipe != AUTO:
        load_recipe(recipe, overrides)  # refuses a faulty recipe before anything is made
    options = ShardOptions(propensity_a=0.55, propensity_b=1.5)  # of the Tate collection
    say(f"1/3 shard {raw} to {data}")
    moments = [time.perf_counter()]
    shard(raw, data, options, (), say)
    moments.append(time.perf_counter())
    say(f"2/3 train {recipe} into {run}, with a miner")
    require_output_folder(run, "trained")  # the run of an earlier demo
    storage.remove(run, recursive=True)
    outcome = _train(data, run, recipe, overrides)
    moments.append(time.perf_counter())
    say("3/3 evaluate on test")
    report = evaluate(data, run)
    moments.append(time.perf_counter())
    spans = zip(("shard", "train", "evaluate"), moments[:-1], moments[1:], strict=True)
    seconds = {name: round(end - start, 2) for name, start, end in spans}
    _print(report, seconds)
    return {"data": data, "run": run, **outcome, **report, "seconds": seconds}


def _train(data: str, run: str, recipe: str, overrides: Sequence[str]) -> dict[str, Any]:
    from extremis.auto import run_auto
    from extremis.supervisor import train
    from trainer.settings.resolve import resolve

    if recipe == AUTO:
        return run_auto(data, run, overrides=overrides)
    resolved = resolve(recipe, overrides, data)
    for line in resolved.lines(data):
        say(line)
    return train(data, run, resolved.recipe, beam_options=())


def _print(report: dict[str, Any], seconds: dict[str, float]) -> None:
    table(f"test: {report['queries']:,} queries, 95 % intervals", *metric_grid(report))
    names = list(XR_LINEAR)
    ours = [f"{report['metrics'][name]:.2f}" for name in names]
    theirs = [f"{value:.2f}" for value in XR_LINEAR.values()]
    table(
        "compared with a linear model (docs/results.md)",
        ["%", *names],
        [["this run", *ours], ["PECOS XR-Linear", *theirs]],
    )
    results.print("seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))


def _example() -> str:
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "tate", package.parent / "examples" / "tate"):  # in an installation, in a checkout
        if folder.is_dir():
            return str(folder)
    raise InputError(
        f"{folder}: the Tate data set is missing. Install Extremis again, or run the demo from a checkout. For your "
        "own data use extremis shard, run and evaluate."
    )
