"""`extremis train`."""

from typing import Any

import click

from extremis.commands.options import training_options, with_device
from extremis.console import say


@click.command()
@training_options
def train(**options: Any) -> dict[str, Any] | None:
    """Train RECIPE on DATA into RUN, with the tables that a miner elsewhere publishes.

    RECIPE is a name (see `extremis recipes`) or a TOML file.

    \b
    Examples:
      extremis train astra data/ runs/1 --set train.epochs=30
      extremis train astra data/ runs/1 --resume
      extremis train astra data/2/ runs/2 --from runs/1
      torchrun --nproc-per-node 2 -m extremis train astra data/ runs/1
    """
    return train_run(**options)


def train_run(
    recipe: str,
    run: str,
    overrides: tuple[str, ...],
    device: str | None,
    from_run: str | None = None,
    **options: Any,
) -> dict[str, Any] | None:
    """Train on the ranks that torchrun launched; rank 0 returns the outcome."""
    from trainer.config import check_keys

    check_keys(recipe, overrides)  # a typo is told before PyTorch is loaded

    from extremis.training.ranks import joined
    from extremis.training.train import train as train_recipe
    from trainer.settings.resolve import resolve

    process = process_options(options)
    with joined() as group:
        resolved = resolve(recipe, with_device(overrides, device, from_run), options["data"])
        for line in resolved.lines(options["data"]) if group.first else ():
            say(line)
        outcome = train_recipe(run=run, recipe=resolved.recipe, group=group, process=process, **options)
        if group.first:
            say(f"{run}: trained; next: extremis evaluate {options['data']} {run}")
    return {"run": run, **outcome} if group.first else None


def process_options(options: dict[str, Any]) -> Any:
    """Take those of the training's process out of `options`."""
    from extremis.training.process import ProcessOptions

    return ProcessOptions(**{name: options.pop(name) for name in ("metrics_host", "metrics_port", "grace")})
