"""Calls of commands from Python: options by the names of the command line, checked and defaulted by it."""

import difflib
import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from extremis.api.result import Result
from extremis.cli import cli
from extremis.console import Event, output
from schemas.errors import InputError

Progress = bool | Callable[[Event], object]
OUTPUT = ("json", "quiet", "verbose", "help")  # options that are about a terminal


def call(name: str, places: Sequence[Any], options: Mapping[str, Any], beam_options: Sequence[str] = ()) -> Result:
    """Run the command `name` at `places`, its arguments in their order; the object that its `--json` prints.

    `progress` among the options: True is as on the command line, False nothing, a function gets every event.
    Raises ExtremisError; InputError also for an option that the command does not have, or that it refuses.
    """
    stated = dict(options)
    progress = stated.pop("progress", True)
    arguments = [*_words(cli.commands[name], stated), "--", *(_text(place) for place in places), *beam_options]
    listener = progress if callable(progress) else None
    line = shlex.join(["extremis", name, *arguments])
    with output(listener=listener, quiet=progress is False, tables="nowhere", command=line):
        try:
            context = cli.commands[name].make_context(name, arguments)
            body = _plain(cli.commands[name])(**{key: context.params[key] for key in _own(cli.commands[name])})
        except click.ClickException as error:
            raise InputError(f"{name}: {error.format_message()}") from None
    return Result(name, body or {})


def option_names(command: click.Command) -> dict[str, click.Option]:
    """Return the options of `command` that Python has, by name: `--max-tokens` is `max_tokens`."""
    options = (param for param in command.params if isinstance(param, click.Option))
    named = {max(option.opts, key=len).lstrip("-").replace("-", "_"): option for option in options}
    return {name: option for name, option in named.items() if name not in OUTPUT}


def _words(command: click.Command, options: Mapping[str, Any]) -> Iterable[str]:
    """Yield the words of the command line that state `options`; None is the default."""
    allowed = option_names(command)
    for name, value in options.items():
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise InputError(f"{command.name}: no option {name!r}; {meant}There are {', '.join(allowed)}, progress.")
        option = allowed[name]
        flag = max(option.opts, key=len)
        if value is None:
            continue
        if option.is_flag:
            yield from [flag] if value else option.secondary_opts[:1]
        elif option.multiple:
            pairs = [f"{key}={_toml(part)}" for key, part in value.items()] if isinstance(value, Mapping) else value
            yield from (f"{flag}={pair}" for pair in pairs)
        else:
            yield f"{flag}={_text(value)}"


def _text(value: Any) -> str:
    """Write a value as the command line has it: 0.55,1.5 for (0.55, 1.5), key=id,text=query for a mapping."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={part}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _toml(value: Any) -> str:
    """Write a value of a recipe as TOML, which JSON's numbers, strings, truth values and lists are."""
    return json.dumps(value)


def _own(command: click.Command) -> list[str]:
    """Name the parameters of the function behind `command`, as click passes them."""
    shown = {"as_json", "quiet", "verbose"}
    return [str(param.name) for param in command.params if param.name not in shown and param.expose_value]


def _plain(command: click.Command) -> Callable[..., Any]:
    """Return the function of `command` without what `output_options` does around it."""
    function: Callable[..., Any] = command.callback.__wrapped__  # type: ignore[union-attr]
    return function
