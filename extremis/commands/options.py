"""Options that several commands share, and parsers of their values."""

import contextlib
import functools
import json
import re
import traceback
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from extremis.console import at_work, notes, output, print_json
from schemas.errors import ExtremisError, InputError
from schemas.options import DEVICES


class _Device(click.ParamType):
    """The name of a device."""

    name = "auto|cpu|cuda|cuda:N"

    def convert(self, value: str, param: Any, ctx: Any) -> str:
        if not re.match(DEVICES, value):
            self.fail(f"{value!r}: expected auto, cpu, cuda, or a GPU's number as in cuda:1.", param, ctx)
        return value


_START_TIMEOUT = "extremis.start_timeout"
POSITIVE, NOT_NEGATIVE = click.IntRange(1), click.IntRange(0)

step_option = click.option("--step", type=NOT_NEGATIVE, help="Step of the checkpoint. Default: the newest.")
device_option = click.option(
    "--device", type=_Device(), default="auto", help="Where to compute. Default: auto, a GPU where there is one."
)


def _complete_recipe(context: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the name of a recipe, or else a file."""
    from trainer.config import recipe_names

    names = [name for name in ("auto", *recipe_names()) if name.startswith(begun)]
    return [CompletionItem(name) for name in names] or [CompletionItem(begun, type="file")]


recipe_option = click.option(
    "--recipe", default="astra", shell_complete=_complete_recipe, help="A recipe's name or TOML file."
)
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the recipe, e.g. train.epochs=5."
)
text_option = click.option(
    "--text",
    type=click.Choice(["title+content", "title"]),
    default="title+content",
    help="Fields that make up a text, where records have a title.",
)
fields_option = click.option(
    "--fields", metavar="NAME=NAME,...", help="Names of the fields in INPUT, e.g. key=id,text=query."
)


def combine(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return one decorator that adds arguments and options in this order."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def output_options(command: Callable[..., Any]) -> Callable[..., None]:
    """Add --json, --quiet and --verbose to a command. With --json the object that it returns is all of its output."""
    name = command.__name__

    @click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else, to standard output."
    )
    @click.option("-q", "--quiet", is_flag=True, help="No progress: results and errors alone.")
    @click.option(
        "-v", "--verbose", is_flag=True, help="Seconds before each line of progress, a traceback with errors."
    )
    @functools.wraps(command)
    def with_output(as_json: bool, quiet: bool, verbose: bool, **options: Any) -> None:
        with output(quiet=quiet, verbose=verbose, tables="stderr" if as_json else "stdout"):
            try:
                with contextlib.nullcontext() if options.get("watch") else at_work(f"{name}: at work"):
                    body = command(**options)
            except ExtremisError:
                if verbose:
                    notes.print(traceback.format_exc(), markup=False)
                raise
        if as_json and body is not None:
            print_json(body)

    return with_output


def _keep_timeout(context: click.Context, option: click.Parameter, seconds: float | None) -> None:
    context.meta[_START_TIMEOUT] = seconds


def _with_timeout(context: click.Context, argument: click.Parameter, beam_options: tuple[str, ...]) -> tuple[str, ...]:
    """Pass --start-timeout on among the Beam options: wherever these go, the check of their workers goes, too."""
    seconds = context.meta.get(_START_TIMEOUT)
    return beam_options if seconds is None else (*beam_options, f"--start_timeout={seconds:g}")


beam_tail = combine(
    click.option(
        "--start-timeout",
        type=click.FloatRange(min=0),
        is_eager=True,
        expose_value=False,
        callback=_keep_timeout,
        help="Seconds for the workers of Flink or Spark to answer before the start. Default: 60. 0: do not ask them.",
    ),
    click.argument("beam_options", nargs=-1, type=click.UNPROCESSED, callback=_with_timeout),
)


training_options = combine(
    click.argument("recipe", shell_complete=_complete_recipe),
    click.argument("data"),
    click.argument("run"),
    set_option,
    click.option(
        "--from",
        "--from-run",
        "from_run",
        metavar="RUN1",
        help="Go on from RUN1, a run on an earlier version of DATA: its encoder, and its vectors by label id.",
    ),
    click.option(
        "--device", type=_Device(), help="Where to compute. Default: the recipe's, auto, a GPU where there is one."
    ),
    click.option(
        "--resume", is_flag=True, help="Continue from the newest checkpoint of RUN, or start if there is none."
    ),
    click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve metrics for Prometheus. 0: a free port."),
    click.option(
        "--grace",
        type=click.FloatRange(min=0),
        default=25.0,
        help="Seconds after SIGTERM for saving a checkpoint. 0: end at once.",
    ),
    click.option("--metrics-host", default="127.0.0.1", help="Address that the port listens on."),
    output_options,
)


def with_device(overrides: tuple[str, ...], device: str | None, from_run: str | None = None) -> tuple[str, ...]:
    """Return the changes of a recipe that --set, --device and --from state."""
    more = {"train.device": device, "train.start_from": from_run}
    stated = (f"{key}={json.dumps(value)}" for key, value in more.items() if value is not None)
    return (*overrides, *stated)


dump_options = combine(  # of a pipeline that makes a table from a dump
    click.argument("data"),
    click.argument("run"),
    click.option("--epoch", type=NOT_NEGATIVE, help="Epoch of the dump. Default: the newest complete dump."),
    click.option("--watch", is_flag=True, help="Process every dump as it is completed, until the run is finished."),
    click.option("--queries", metavar="URL", help="Embeddings from `extremis embed` instead of the dump's."),
    click.option("--for-epoch", type=NOT_NEGATIVE, help="First epoch to train on the table. Default: the dump's."),
    click.option("--out", metavar="URL", help="Publish at URL instead of in RUN."),
    click.option("--memory", metavar="SIZE", help="Memory of one worker process, e.g. 8GiB. Default: 4GiB."),
    click.option("--seed", type=NOT_NEGATIVE, help="Seed of all random choices. Default: 0."),
    click.option("--overwrite", is_flag=True, default=None, help="Replace a table made with other options."),
    output_options,
    beam_tail,
)


def require_watchable(watch: bool, options: dict[str, Any]) -> None:
    """Check that nothing names one dump or place beside --watch. Raises InputError."""
    names = [name for name in ("epoch", "queries", "out", "for_epoch", "overwrite") if options[name] is not None]
    if watch and names:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in names)
        raise InputError(f"--watch processes every dump and publishes each table in its place; leave out {flags}.")


def stated(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the command line states."""
    return {name: value for name, value in options.items() if value is not None}


def number(text: str) -> int:
    """Parse a whole number, also written as 370e6."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value < 1 or value != int(value) or value > 1e15:
        raise click.BadParameter(f"{text!r} is no whole number of at least 1, such as 370e6.")
    return int(value)


def comma_list(
    parse: Callable[[str], Any], expected: str, count: int | None = None
) -> Callable[[str | tuple[Any, ...]], tuple[Any, ...]]:
    """Return a parser of values with commas between. `parse` reads one value, or raises ValueError or BadParameter."""

    def convert(text: str | tuple[Any, ...]) -> tuple[Any, ...]:
        if isinstance(text, tuple):  # the option's default
            return text
        try:
            values = tuple(parse(part.strip()) for part in text.split(",") if part.strip())
        except (ValueError, click.BadParameter):
            values = ()
        if not values or count not in (None, len(values)):
            raise click.BadParameter(f"{text!r}: expected {expected}.")
        return values

    return convert
