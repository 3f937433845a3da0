"""`extremis train` and `run`."""

from collections.abc import Callable

import click

from extremis.commands.options import beam_tail, json_option
from extremis.console import print_json


def training_options(command: Callable[..., None]) -> Callable[..., None]:
    """What `train` and `run` take alike."""
    for option in reversed(
        (
            click.argument("recipe"),
            click.argument("data"),
            click.argument("run"),
            click.option(
                "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the recipe, e.g. train.epochs=5."
            ),
            click.option(
                "--resume", is_flag=True, help="Go on from the run's newest checkpoint; start where there is none."
            ),
            click.option(
                "--metrics-port", type=click.IntRange(0, 65535), help="Serve figures for Prometheus. 0: any free port."
            ),
            click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Who may fetch them."),
            json_option,
        )
    ):
        command = option(command)
    return command


@click.command()
@training_options
def train(
    recipe: str,
    data: str,
    run: str,
    overrides: tuple[str, ...],
    resume: bool,
    metrics_port: int | None,
    metrics_host: str,
    as_json: bool,
) -> None:
    """Train RECIPE on DATA into RUN, using the tables that a miner elsewhere publishes.

    RECIPE is a name (see `extremis recipes`) or a TOML file.

    \b
    Examples:
      extremis train astra data/ runs/1 --set train.epochs=30
      extremis train astra data/ runs/1 --resume
      torchrun --nproc-per-node 2 -m extremis train astra data/ runs/1
    """
    _train(recipe, data, run, overrides, resume, (metrics_host, metrics_port), as_json, None)


@click.command()
@training_options
@beam_tail
def run(
    recipe: str,
    data: str,
    run: str,
    overrides: tuple[str, ...],
    resume: bool,
    metrics_port: int | None,
    metrics_host: str,
    as_json: bool,
    beam_options: tuple[str, ...],
) -> None:
    """Train RECIPE on DATA into RUN, with a miner process beside the trainer.

    The trainer does not wait for the miner: a table that is late is used from a later epoch.

    \b
    Example:
      extremis run astra data/ runs/1
    """
    _train(recipe, data, run, overrides, resume, (metrics_host, metrics_port), as_json, beam_options)


def _train(
    recipe: str,
    data: str,
    run: str,
    overrides: tuple[str, ...],
    resume: bool,
    metrics: tuple[str, int | None],
    as_json: bool,
    beam_options: tuple[str, ...] | None,
) -> None:
    from extremis.training.ranks import joined
    from extremis.training.train import train as train_run
    from trainer.config import load_recipe

    with joined() as group:
        outcome = train_run(data, run, load_recipe(recipe, overrides), resume, beam_options, group, metrics)
    if as_json and group.first:
        print_json({"run": run, **outcome})
