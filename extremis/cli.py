"""The command line `extremis`: one command per step of the loop."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from extremis.commands.ablate import ablate
from extremis.commands.cluster import cluster
from extremis.commands.demo import demo
from extremis.commands.embed import embed
from extremis.commands.evaluate import evaluate
from extremis.commands.export import export
from extremis.commands.fuse import fuse
from extremis.commands.inspect import inspect
from extremis.commands.mine import mine
from extremis.commands.plan import plan
from extremis.commands.predict import predict
from extremis.commands.recipes import recipes
from extremis.commands.report import report
from extremis.commands.run import run
from extremis.commands.shard import shard
from extremis.commands.train import train
from extremis.console import say_error
from extremis.installation import extra_of
from schemas.errors import ExtremisError, MissingExtra
from schemas.manifest import code_version


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True})
@click.version_option(code_version(), prog_name="extremis")
def cli() -> None:
    """Extreme classification that streams: shard, train, mine, join, evaluate.

    DATA and RUN are directories or object-store prefixes (s3://, gs://, ...).

    \b
    Example, the whole loop:
      extremis shard raw/ data/
      extremis run auto data/ runs/1
      extremis evaluate data/ runs/1 --scores fused
    """


for command in (
    *(shard, train, run, mine, cluster, embed),
    *(evaluate, fuse, export, predict),
    *(inspect, report, plan, recipes, ablate, demo),
):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; user errors become one message and an exit status, never a traceback.

    `arguments`: by default those of this process. Raises SystemExit unless the command succeeds.
    """
    try:
        cli.main(arguments, standalone_mode=False)
    except ExtremisError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if extra is None:
            raise
        _fail(MissingExtra(f"this command needs the module {error.name}, which is not installed", extra))
    except click.exceptions.Abort:
        say_error("interrupted")
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(error: ExtremisError) -> NoReturn:
    say_error(f"error: {error}")
    sys.exit(error.exit_status)
