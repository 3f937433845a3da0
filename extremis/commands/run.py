"""`extremis run`."""

from typing import Any

import click

from extremis.commands.options import beam_tail, training_options
from extremis.commands.train import train_run


@click.command()
@training_options
@beam_tail
def run(**options: Any) -> dict[str, Any] | None:
    """Train RECIPE on DATA into RUN, with a miner process beside the trainer.

    The trainer does not wait for the miner: a table that is late is used from a later epoch. Everything after -- goes
    to the miner's Beam.

    \b
    Example:
      extremis run astra data/ runs/1
    """
    return train_run(**options)
