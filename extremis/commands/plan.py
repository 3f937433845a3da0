"""`extremis plan`."""

from dataclasses import replace
from typing import Any

import click

from extremis.commands.options import POSITIVE, number, output_options, recipe_option, set_option, stated
from extremis.console import say


@click.command()
@click.option("--queries", type=number, help="N. Default: as many as DATA has.")
@click.option("--labels", type=number, help="L. Default: as many as DATA has.")
@click.option("--data", help="A sharded sample of the data; its averages stand for all rows.")
@click.option("--tokens", type=float, default=32, help="Tokens per query, on average.")
@click.option("--label-tokens", type=float, default=8, help="Tokens per label, on average.")
@click.option("--labels-per-query", type=float, default=5, help="Labels per query, on average.")
@click.option("--key-bytes", type=float, default=12, help="Characters of a key, on average.")
@click.option("--text-bytes", type=float, default=40, help="Characters of a label, on average.")
@click.option("--vocabulary", type=click.IntRange(2), default=30_000, help="Number of tokens.")
@recipe_option
@set_option
@click.option("--dimension", type=POSITIVE, help="D. Default: the recipe's.")
@click.option("--width", type=POSITIVE, help="K of the negative tables. Default: the recipe's.")
@click.option("--epochs", type=POSITIVE, help="Default: the recipe's.")
@click.option("--ranks", type=POSITIVE, default=1, help="Trainer processes.")
@click.option("--workers", type=POSITIVE, default=1, help="Pipeline workers.")
@click.option(
    "--engine", type=click.Choice(["flink", "spark", "dataflow"]), help="Cluster of the pipelines. Default: none."
)
@click.option("--memory", default="8GiB", help="Memory of each process.")
@output_options
def plan(recipe: str, overrides: tuple[str, ...], engine: str | None, **options: Any) -> dict[str, Any]:
    """Say what a run will take before it is started: bytes of every table, memory and time of every step.

    Times are of cores like those that the formulas' figures were measured on.
    What a recipe leaves to the data is set as the numbers here would decide.

    \b
    Examples:
      extremis plan --queries 370e6 --labels 120e6 --tokens 10 --dimension 64 --memory 64GiB
      extremis plan --data data/ --queries 370e6 --labels 120e6 --json
      extremis plan --queries 370e6 --labels 120e6 --tokens 10 --engine flink --workers 64
    """
    from extremis.planning import plan as planning
    from trainer.config import load_recipe

    keys = {"dimension": "encoder.dimension", "width": "negatives.width", "epochs": "train.epochs"}
    changes = stated({key: options.pop(name) for name, key in keys.items()})
    overrides = (*overrides, *(f"{key}={value}" for key, value in changes.items()))
    data, queries, labels, memory = (options.pop(name) for name in ("data", "queries", "labels", "memory"))
    workload = planning.workload(data, queries, labels, load_recipe(recipe, overrides), memory, options)
    resolved = planning.resolve_for(workload, recipe, overrides, data)
    for line in resolved.reasons:
        say(line)
    report = planning.plan(replace(workload, recipe=resolved.recipe), data, engine)
    report["settings"] = {key: setting.value for key, setting in resolved.settings.items()}
    planning.show(report)
    say(f"next: extremis run {recipe} {data or 'DATA'} RUN")
    return report
