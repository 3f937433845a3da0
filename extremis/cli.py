"""`extremis`: one command a step of the loop."""

import os
import sys
from collections.abc import Sequence

import click

from extremis.commands.compare import ablate, demo, recipes
from extremis.commands.evaluate import evaluate, fuse
from extremis.commands.look import inspect, plan, report
from extremis.commands.serve import export, predict
from extremis.commands.shard import shard
from extremis.commands.tables import cluster, embed, mine
from extremis.commands.train import run, train
from extremis.console import say
from schemas.errors import ExtremisError
from schemas.manifest import code_version


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(code_version(), prog_name="extremis")
def cli() -> None:
    """Extreme classification that streams: shard, train, mine, join, evaluate.

    DATA and RUN are directories or object-store prefixes (s3://, gs://, ...).

    \b
    Example, the whole loop:
      extremis shard raw/ data/
      extremis run astra data/ runs/1
      extremis evaluate data/ runs/1
    """


for command in (
    *(shard, train, run, mine, cluster, embed),
    *(evaluate, fuse, export, predict),
    *(inspect, report, plan, recipes, ablate, demo),
):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; user errors become one message and an exit status, never a traceback.

    `arguments` are those of this process where they are not given. Raises SystemExit unless all went well.
    """
    try:
        cli.main(arguments, standalone_mode=False)
    except ExtremisError as error:
        say(f"error: {error}")
        sys.exit(error.exit_status)
    except click.exceptions.Abort:
        say("interrupted")
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
