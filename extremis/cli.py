"""The command line `extremis`: one command per step of the loop."""

import io
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from extremis.commands.ablate import ablate
from extremis.commands.cluster import cluster
from extremis.commands.data import data
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
from extremis.console import open_streams, output, say_error
from extremis.installation import extra_of
from schemas.errors import ExtremisError, MissingExtra, lack_of_memory

TRACEBACK = "EXTREMIS_TRACEBACK"  # environment variable: show tracebacks


def _print_version(context: click.Context, option: click.Parameter, stated: bool) -> None:
    if stated:
        from schemas.manifest import code_version

        click.echo(f"extremis, version {code_version()}")
        context.exit()


class _Groups(click.Group):
    """Commands in the help by the step of the loop that they are for."""

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in STEPS.items():
            with formatter.section(title):
                formatter.write_dl([(str(each.name), each.get_short_help_str(limit=200)) for each in commands])


STEPS = {
    "Data": (shard, data),
    "Train": (run, train, mine, cluster, recipes, plan),
    "Look": (evaluate, report, inspect, ablate, fuse),
    "Use": (export, predict, embed),
    "Try": (demo,),
}


@click.group(
    cls=_Groups,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Extreme classification that streams: shard, train, mine, join, evaluate.

    DATA and RUN are directories or object-store prefixes (s3://, gs://, ...).

    \b
    Example, the whole loop:
      extremis shard raw/ data/
      extremis run auto data/ runs/1
      extremis evaluate data/ runs/1 --scores fused
    """


for command in (each for commands in STEPS.values() for each in commands):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; user errors become one message and an exit status, never a traceback.

    `arguments`: by default those of this process. Raises SystemExit unless the command succeeds.
    """
    if arguments is None:
        open_streams()
        if TRACEBACK not in os.environ:
            sys.unraisablehook = lambda unraisable: None  # destructors of libraries print tracebacks
    try:
        words = sys.argv[1:] if arguments is None else arguments
        with output(command=shlex.join(["extremis", *words])):
            cli.main(arguments, standalone_mode=False)
    except click.exceptions.Abort:
        say_error("interrupted")
        sys.exit(130)
    except click.ClickException as error:
        error.show(said := io.StringIO())
        say_error(said.getvalue().rstrip())
        sys.exit(2)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except BrokenPipeError:  # whoever read the results has enough
        sys.exit(1)
    except Exception as error:
        _fail(error)


def describe_fault(error: Exception) -> str:
    """Say on one line what went wrong where, and how to see more."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return (
        f"{type(error).__name__}: {text} ({os.path.basename(frame.filename)}, line {frame.lineno}). Please report it; "
        f"with {TRACEBACK}=1 in the environment the command shows the traceback."
    )


def _fail(error: Exception) -> NoReturn:
    """Say in one message what went wrong, and exit; nobody wants a traceback, but whoever looks for a fault."""
    if isinstance(error, ModuleNotFoundError) and (extra := extra_of(error.name or "")) is not None:
        error = MissingExtra(f"this command needs the module {error.name}, which is not installed", extra)
    message, status = lack_of_memory(error), 1
    if message is None and isinstance(error, ExtremisError):
        message, status = str(error), error.exit_status
    if message is None:
        if os.environ.get(TRACEBACK):
            raise error
        message = f"a fault of Extremis, not of your input: {describe_fault(error)}"
    say_error(f"error: {message}")
    sys.exit(status)
