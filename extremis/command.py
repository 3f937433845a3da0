"""The command of a function: click's options out of the function's model, and a call with what was typed."""

import contextlib
import functools
import glob
import inspect
import os
import re
import traceback
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem
from pydantic.fields import FieldInfo

from extremis.alive import show_alive
from extremis.console import messages, output, print_json, results_first, show_spinner
from extremis.function import Described, Spelled, facts_of, unwrap
from extremis.result import show
from schemas.errors import ExtremisError, flag_of, option
from schemas.logs import LOG_FORMAT, about
from schemas.options import Shown
from schemas.sizes import PATIENCE, parse_seconds

_COMMON_OPTIONS = {
    ("as_json", "--json"): "Print one JSON object to standard output, and nothing else.",
    ("-q", "--quiet"): "Print results and errors only, no progress.",
    ("-v", "--verbose"): "Print the elapsed seconds before each line, and tracebacks with errors.",
}
_PATIENCE = "How long storage is tried again in an outage, such as 30m. Default: 5 attempts."
_LOGS = "Format of the lines on standard error; json: one object a line, for collectors of logs."


class _Value(click.ParamType):
    """A value that the function's model parses; the completion offers `names`, TOML files or places."""

    name = "text"

    def __init__(self, kind: Any, shown: Shown) -> None:
        self._names = shown.names or (lambda: [str(each) for each in get_args(kind)] * (get_origin(kind) is Literal))
        self._place, self._toml = shown.place or any(get_origin(m) is PathLike for m in get_args(kind)), shown.names
        self.name = {int: "integer", float: "float"}.get(kind, "text")
        self.choices = get_args(kind) if get_origin(kind) is Literal else ()

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        return f"[{'|'.join(self.choices)}]" if self.choices else None

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        matching = [name for name in self._names() if name.startswith(incomplete)]
        if self._place and self._toml:
            matching += sorted(glob.glob(f"{glob.escape(incomplete)}*.toml"))
        return [CompletionItem(name) for name in matching] or [CompletionItem(incomplete, type="file")] * self._place


class _Option(click.Option):
    """An option with its field, whose default and bounds the help shows."""

    def __init__(self, names: Sequence[str], field: FieldInfo, **keywords: Any) -> None:
        super().__init__(names, default=None, **keywords)
        self.field = field

    def get_help_record(self, context: click.Context) -> tuple[str, str] | None:
        text, (_, shown, bounds) = self.field.description or "", facts_of(self.field)
        if "{names}" in text:
            with contextlib.suppress(ImportError):  # the installation has no pipelines
                names = [] if shown.names is None else [*shown.names()]
                text = text.replace("{names}", f": {', '.join(names)}" if names else "")
        self.help = text.replace("{names}", "").format_map(Spelled())
        record = super().get_help_record(context)
        default = self.field.default
        facts = [] if default in (None, False, (), "", ...) or "Default:" in text else [f"default: {_typed(default)}"]
        facts += [described] if (described := _bounds(bounds)) else []
        return record and (record[0], f"{record[1]}  [{'; '.join(facts)}]" if facts else record[1])


def _typed(value: Any) -> str:
    """Return a default as one types it."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _bounds(metadata: Sequence[Any]) -> str:
    """Describe the bounds of a number, as in 0<=x<1."""
    sides = {name: getattr(each, name) for each in metadata for name in ("ge", "gt", "le", "lt") if hasattr(each, name)}
    if "le" not in sides and "lt" not in sides:
        return "".join(f"x{sign}{sides[name]}" for name, sign in (("ge", ">="), ("gt", ">")) if name in sides)
    low = "".join(f"{sides[name]}{sign}" for name, sign in (("ge", "<="), ("gt", "<")) if name in sides)
    return low + "x" + "".join(f"{sign}{sides[name]}" for name, sign in (("le", "<="), ("lt", "<")) if name in sides)


class Command(click.Command):
    """The command of a function; the help groups the options by the part of the model that declares them."""

    def __init__(self, described: Described) -> None:
        self.described = described
        params = [self._parameter(name, field) for name, field in described.fields.items() if name != "beam_options"]
        params += [click.Option(names, is_flag=True, help=help) for names, help in _COMMON_OPTIONS.items()]
        shown: Any = {"show_envvar": True, "show_default": True}
        logs = click.Choice(["text", "json"])
        params.append(click.Option(["--log-format"], type=logs, help=_LOGS, envvar=LOG_FORMAT, default="text", **shown))
        params.append(click.Option(["--patience"], metavar="TIME", help=_PATIENCE, envvar=PATIENCE, **shown))
        if "beam_options" in described.fields:
            params.append(click.Argument(["beam_options"], nargs=-1, type=click.UNPROCESSED))
        text = re.sub(r"^(?=Examples?:$)", "\b\n", described.text, flags=re.MULTILINE)  # click prints these unchanged
        super().__init__(described.name, params=params, help=text)

    def invoke(self, context: click.Context) -> Callable[[], None]:
        """Return a function that runs the command, to be called outside of click."""
        return functools.partial(_run, self.described, context.params)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        model = self.described.options
        aliases = {} if model is None else {key: field.alias or key for key, field in model.model_fields.items()}
        headings: dict[str, str] = {}  # by option: that of the first class that declares it
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for declaring in getattr(model, "__mro__", ()):
            heading = str(vars(declaring).get("HEADING", "Options"))
            groups.setdefault(heading, [])
            for key in inspect.get_annotations(declaring):
                headings.setdefault(aliases.get(key, key), heading)
        for param in self.get_params(context):
            if isinstance(param, click.Option) and (record := param.get_help_record(context)) is not None:
                name = str(param.name)
                groups["Options" if name in self.described.own else headings.get(name, "Options")].append(record)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def _parameter(self, name: str, field: FieldInfo) -> click.Parameter:
        kind, shown, _ = facts_of(field)
        own = self.described.own.get(name)
        if own is not None and own.kind is own.VAR_POSITIONAL:  # the field has a tuple of these
            kind, inner = unwrap(own.annotation)
            shown = next((each for each in inner if isinstance(each, Shown)), Shown())
        value = _Value(kind, shown)
        if own is not None and own.kind is not own.KEYWORD_ONLY:
            several = own.kind is own.VAR_POSITIONAL
            required = several or own.default is own.empty
            return click.Argument(
                [name], type=value, metavar=shown.metavar, nargs=-1 if several else 1, required=required
            )
        names = [name, flag_of(name)]
        if kind is bool:
            names[-1] += f"/--no-{names[-1][2:]}" if field.default else ""
            return _Option(names, field, is_flag=True)
        return _Option(names, field, type=value, multiple=shown.repeated, metavar=shown.metavar)


def _run(described: Described, values: dict[str, Any]) -> None:
    show_alive()
    common = ("as_json", "quiet", "verbose", "log_format", "patience")
    as_json, quiet, verbose, _, patience = (values.pop(name) for name in common)
    if patience is not None:
        parse_seconds(patience, option("patience", patience))
        os.environ[PATIENCE] = patience  # of this process's workers, its miner and its ranks, too
    about["run"] = str(values.get("run") or "")
    given = {name: value for name, value in values.items() if value not in (None, ())}
    with output(quiet=quiet, verbose=verbose, results="stderr" if as_json else "stdout"), results_first():
        try:
            waiting = contextlib.nullcontext() if given.get("watch") else show_spinner(f"{described.name}: at work")
            with waiting:
                result = described.run(given)
        except ExtremisError:
            if verbose:
                messages.print(traceback.format_exc())
            raise
        if is_first := os.environ.get("RANK", "0") == "0":
            show(result)
        if as_json and is_first:
            print_json(result.to_json())
