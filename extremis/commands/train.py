"""`extremis train`."""

from typing import Any

import click

from extremis.commands.options import training_options
from extremis.console import print_json


@click.command()
@training_options
def train(**options: Any) -> None:
    """Train RECIPE on DATA into RUN, with the tables that a miner elsewhere publishes.

    RECIPE is a name (see `extremis recipes`) or a TOML file.

    \b
    Examples:
      extremis train astra data/ runs/1 --set train.epochs=30
      extremis train astra data/ runs/1 --resume
      torchrun --nproc-per-node 2 -m extremis train astra data/ runs/1
    """
    train_run(**options)


def train_run(
    recipe: str,
    run: str,
    overrides: tuple[str, ...],
    metrics_host: str,
    metrics_port: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train on the ranks that torchrun launched; rank 0 reports."""
    from extremis.training.ranks import joined
    from extremis.training.train import train as train_recipe
    from trainer.config import load_recipe

    with joined() as group:
        metrics = metrics_host, metrics_port
        outcome = train_recipe(run=run, recipe=load_recipe(recipe, overrides), group=group, metrics=metrics, **options)
    if as_json and group.first:
        print_json({"run": run, **outcome})
