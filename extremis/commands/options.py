"""Options that several commands share, and parsers of their values."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from schemas.errors import InputError

Command = TypeVar("Command", bound=Callable[..., Any])

POSITIVE, NOT_NEGATIVE = click.IntRange(1), click.IntRange(0)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object last.")
beam_tail = click.argument("beam_options", nargs=-1, type=click.UNPROCESSED)
step_option = click.option("--step", type=NOT_NEGATIVE, help="Step of the checkpoint. Default: the newest.")
recipe_option = click.option("--recipe", default="astra", help="A recipe's name or TOML file.")
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


def combine(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Return one decorator that adds arguments and options in this order."""

    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


training_options = combine(
    click.argument("recipe"),
    click.argument("data"),
    click.argument("run"),
    set_option,
    click.option("--resume", is_flag=True, help="Continue from the newest checkpoint of RUN, or start without one."),
    click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve metrics for Prometheus. 0: a free port."),
    click.option("--metrics-host", default="127.0.0.1", help="Address that the port listens on."),
    json_option,
)

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
    json_option,
    beam_tail,
)


def require_watchable(epoch: int | None, options: dict[str, Any]) -> None:
    """Check that nothing names one dump or place beside --watch. Raises InputError."""
    names = ["epoch", *(name for name in ("queries", "out", "for_epoch", "overwrite") if options[name])]
    if epoch is None:
        names.remove("epoch")
    if names:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in names)
        raise InputError(f"--watch processes every dump and publishes each table in its place; leave out {flags}.")


def stated(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the command line states."""
    return {name: value for name, value in options.items() if value is not None}


class Count(click.ParamType):
    """A whole number, also written as 370e6."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if number < 1 or number != int(number) or number > 1e15:
            self.fail(f"{value!r} is no whole number of at least 1, such as 370e6.", param, context)
        return int(number)


class CommaList(click.ParamType):
    """A tuple of values with commas between. `parse` reads one value, or raises ValueError."""

    def __init__(self, parse: Callable[[str], Any], expected: str, count: int | None = None) -> None:
        self.name = "list"
        self._parse, self._expected, self._count = parse, expected, count

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            values = tuple(self._parse(part.strip()) for part in value.split(",") if part.strip())
        except ValueError:
            values = ()
        if not values or self._count not in (None, len(values)):
            self.fail(f"{value!r}: expected {self._expected}.", param, context)
        return values
