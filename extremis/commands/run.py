"""`extremis run`."""

from typing import Any

import click

from extremis.commands.options import beam_tail, training_options, with_device
from extremis.commands.train import process_options, train_run
from schemas.errors import InputError


@click.command()
@training_options
@click.option("--minutes", type=click.FloatRange(min=0.1), help="With `auto`: time for all of it. Default: no limit.")
@beam_tail
def run(minutes: float | None, **options: Any) -> dict[str, Any] | None:
    """Train RECIPE on DATA into RUN, with a miner process beside the trainer.

    RECIPE is a name (see `extremis recipes`) or a TOML file. `auto` looks at DATA, tries a few recipes on a part of it,
    trains the best into RUN, and learns to add scores of the labels' texts and of near training points.

    A table that is late is used from a later epoch, unless the recipe waits for it (refresh.stale = "wait"). Arguments
    after -- are the miner's Beam options.

    \b
    Examples:
      extremis run auto data/ runs/1 --minutes 10
      extremis run astra data/ runs/2 --set train.epochs=20
      extremis run astra data/2026-11-20/ runs/2026-11-20 --from runs/2026-11-19
    """
    if options["recipe"] != "auto":
        if minutes is not None:
            raise InputError("--minutes is of `extremis run auto`: for a recipe give --set train.minutes=10.")
        return train_run(**options)
    from extremis.auto.run_auto import run_auto

    if options.pop("from_run") is not None:
        raise InputError("--from goes on with a recipe: give that of RUN1, RUN1/recipe.toml or its name, not auto.")
    del options["recipe"]
    options["overrides"] = with_device(options["overrides"], options.pop("device"))
    return run_auto(minutes=minutes or 0.0, process=process_options(options), **options)
