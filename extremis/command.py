"""Commands from typed functions: the function is the Python API, and its signature defines the command line.

Parameters before `*` are arguments, the others are options: `max_tokens` is `--max-tokens`. A parameter's type
determines how its value is parsed. An `Option` in the annotation, or a line under "Options:" in the docstring, adds
bounds and help. The command of a pipeline names the class of the pipeline's options, as in `@command(ShardOptions)`.
Parameters that default to None then take bounds, default and help from the fields of this class.
"""

import contextlib
import difflib
import functools
import glob
import inspect
import json
import os
import re
import shlex
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem

from extremis.console import Event, messages, output, print_json, show_spinner
from extremis.result import Result
from schemas.errors import ExtremisError, InputError
from schemas.logs import LOG_FORMAT, about

if typing.TYPE_CHECKING:
    from schemas.options import Options

P = ParamSpec("P")
AnyOptions = TypeVar("AnyOptions", bound="Options")


@dataclass(frozen=True)
class Option:
    """Properties of a parameter in addition to its type: `Annotated[int, Option(ge=1)]`.

    `flags`: additional names on the command line. `ge`, `gt`, `le`, `lt`: bounds. `parse`: parses a value, or raises
    ValueError with the expected format. `names`: values for shell completion, which also replace {names} in the help.
    `repeated`: the flag is repeated for each value.
    """

    help: str | None = None
    metavar: str | None = None
    flags: tuple[str, ...] | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    parse: Callable[[str], Any] | None = None
    names: Callable[[], Iterable[str]] | None = None
    repeated: bool | None = None


Progress = bool | Callable[[Event], object]
_PROGRESS = "    progress: True: as on the command line; False: no progress; or a function, called with every event."
_PYTHON_ONLY = ("progress", "beam_options")  # the command line has --quiet, and Beam's options after --
_SHELL_ONLY = ("as_json", "quiet", "verbose", "log_format")
_COMMON_OPTIONS = {
    ("as_json", "--json"): "Print one JSON object to standard output, and nothing else.",
    ("-q", "--quiet"): "Print results and errors only, no progress.",
    ("-v", "--verbose"): "Print the elapsed seconds before each line, and tracebacks with errors.",
}
_LOGS = "Format of the lines on standard error; json: one object a line, for collectors of logs."
# A whole command line, which is kept; or a flag, with a pair or a number after it.
_FLAG_IN_TEXT = re.compile(
    r"extremis [a-z]+ [^`();]*|(--[a-z][a-z-]*)(?![\w-])(?:[ =]([\w.]+)=([\w.,=/-]*\w)|[ =](\d[\w.]*)\b)?"
)


def command(options_class: "type[Options] | None" = None) -> Callable[[Callable[P, Any]], Callable[P, Result]]:
    """Turn a function into a command. It returns the object for `--json`, or None if another rank reports the result.

    The command raises ExtremisError, and InputError for unknown or invalid options.
    """

    def decorate(function: Callable[P, Any]) -> Callable[P, Result]:
        built = Command(function, options_class)

        @functools.wraps(function)
        def from_python(*arguments: P.args, **options: P.kwargs) -> Result:
            return built.call(arguments, options)

        kinds = get_type_hints(function)
        parameters = [parameter.replace(annotation=kinds[name]) for name, parameter in built.parameters.items()]
        from_python.__signature__ = inspect.Signature(parameters, return_annotation=Result)  # type: ignore[attr-defined]
        from_python.__doc__ = built.documentation()
        from_python.command = built  # type: ignore[attr-defined]
        return from_python

    return decorate


def build_options(options_class: type[AnyOptions], arguments: Mapping[str, Any]) -> AnyOptions:
    """Build a pipeline's options from the arguments of its command; None means not given. Raises InputError."""
    from schemas.options import check

    names = {field.alias or name for name, field in options_class.model_fields.items()}
    values = {name: value for name, value in arguments.items() if name in names and value is not None}
    try:
        return check(options_class, values)
    except InputError as error:  # replace names of fields by flags
        clause = rf"(^|; )({'|'.join(names)}): "
        raise InputError(re.sub(clause, lambda match: f"{match[1]}{_flag(match[2])}: ", str(error))) from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class Command:
    """A command that is based on a function: its command line, its docstring with all options, and its Python API."""

    def __init__(self, function: Callable[..., Any], options_class: "type[Options] | None") -> None:
        self.function, self.parameters = function, inspect.signature(function).parameters
        class_fields = {} if options_class is None else options_class.model_fields
        self._fields: dict[str, Any] = {field.alias or name: field for name, field in class_fields.items()}
        self._text, self._helps = _read_docstring(inspect.getdoc(function) or "")
        kinds = get_type_hints(function, include_extras=True)
        self._options = {name: self._option(name, kinds[name]) for name in self.parameters}  # type and properties

    @functools.cached_property
    def click_command(self) -> click.Command:
        """Return the command line: arguments, options, common options, and arguments for Beam."""
        params = [self._parameter(each) for name, each in self.parameters.items() if name not in _PYTHON_ONLY]
        params += [click.Option(names, is_flag=True, help=help) for names, help in _COMMON_OPTIONS.items()]
        environment: Any = {"envvar": LOG_FORMAT, "show_envvar": True, "default": "text"}
        params.append(click.Option(["--log-format"], type=click.Choice(["text", "json"]), help=_LOGS, **environment))
        if "beam_options" in self.parameters:
            params.append(click.Argument(["beam_options"], nargs=-1, type=click.UNPROCESSED))

        def prepare(**values: Any) -> Callable[[], None]:
            """Return a function that runs the command, to be called outside of click."""
            return functools.partial(_run, self.function, values)

        # With this mark click prints examples unchanged.
        text = re.sub(r"^(?=Examples?:$)", "\b\n", self._text, flags=re.MULTILINE)
        return click.Command(self.function.__name__, callback=prepare, params=params, help=text)

    def documentation(self) -> str:
        """Return the docstring with one line per option."""
        lines = []
        for name, parameter in self.parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and name != "progress":
                help = name_arguments(self._help(name).replace("{names}", ""))
                default = self._default(name)
                stated = "" if default in (None, False, (), "") or "Default:" in help else f" Default: {default}."
                lines.append(f"    {name}: {help}{stated}")
        head, mark, examples = self._text.partition("\n\nExample")
        return "\n".join([f"{head}\n\nOptions:", *lines, _PROGRESS + mark + examples])

    def call(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> Result:
        """Run the command from Python: convert the arguments to a command line, and parse the command line."""
        name = self.function.__name__
        for option in options:
            if option not in self.parameters:
                near = difflib.get_close_matches(option, self.parameters, 1)
                meant = f"did you mean {near[0]!r}? " if near else ""
                raise InputError(
                    f"{name}: unknown option {option!r}; {meant}known options: {', '.join(self.parameters)}."
                )
        bound = inspect.signature(self.function).bind(*arguments, **options).arguments
        progress, beam_options = bound.pop("progress", True), bound.pop("beam_options", ())
        objects = {key: value for key, value in bound.items() if self._options[key][0] is Any and not _is_place(value)}
        words = [*_command_line(self.click_command, bound | dict.fromkeys(objects, "-")), *beam_options]
        typed = shlex.join(["extremis", name, *words])
        listener = progress if callable(progress) else None
        redirected = output(listener=listener, quiet=progress is False, results="nowhere", command=typed)
        with naming_arguments(), redirected:
            try:
                params = self.click_command.make_context(name, words).params | objects
                places, settings = _split_arguments(
                    self.function, {key: params[key] for key in params if key not in _SHELL_ONLY}
                )
                return Result(name, self.function(*places, **settings) or {})
            except click.ClickException as error:
                raise InputError(f"{name}: {error.format_message()}") from None

    def _option(self, name: str, annotation: Any) -> tuple[Any, Option]:
        """Return the type of a parameter without None, and the parameter's `Option`."""
        kind, metadata = _unwrap_type(annotation)
        bearers = [*(self._fields[name].metadata if name in self._fields else ()), *metadata]
        properties = [(key.name, getattr(bearer, key.name, None)) for bearer in bearers for key in fields(Option)]
        return kind, Option(**{key: value for key, value in properties if value is not None})

    def _help(self, name: str) -> str:
        field = self._fields.get(name)
        return self._helps.get(name) or self._options[name][1].help or (field.description if field else None) or ""

    def _default(self, name: str) -> Any:
        default = self.parameters[name].default
        if default is None and name in self._fields and "Default:" not in self._help(name):
            return self._fields[name].default
        return default

    def _parameter(self, parameter: inspect.Parameter) -> click.Parameter:
        name, (kind, option) = parameter.name, self._options[parameter.name]
        keywords: dict[str, Any] = {"metavar": option.metavar, "type": _click_type(kind, option)}
        place = kind is Any or os.PathLike in [get_origin(each) for each in get_args(kind)]
        if place or option.names is not None:
            keywords["shell_complete"] = functools.partial(_complete, option.names, place)
        if parameter.kind is not parameter.KEYWORD_ONLY:
            if parameter.kind is parameter.VAR_POSITIONAL:
                return click.Argument([name], nargs=-1, required=True, **keywords)
            if parameter.default is parameter.empty:
                return click.Argument([name], **keywords)
            return click.Argument([name], required=False, default=parameter.default, **keywords)
        names, default = [name, *(option.flags or ()), _flag(name)], self._default(name)
        if kind is bool:
            names[-1] += f"/--no-{_flag(name)[2:]}" if default else ""
            return click.Option(names, is_flag=True, default=bool(default), help=self._help(name))
        return _Option(
            names,
            default=default,
            show_default="Default:" not in self._help(name),
            multiple=bool(option.repeated),
            help=self._help(name),
            listed=option.names,
            **keywords,
        )


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring without its options, and the help of each option."""
    head, mark, rest = text.partition("\n\nOptions:\n")
    section, _, tail = rest.partition("\n\n")
    lines = re.sub(r"\n {5,}", " ", section).splitlines()
    return (f"{head}\n\n{tail}" if mark else text), dict(line.strip().split(": ", 1) for line in lines)


def _unwrap_type(kind: Any) -> tuple[Any, list[Any]]:
    """Return a type without None and annotations, and the annotations, outermost last."""
    if get_origin(kind) is Annotated:
        inner, metadata = _unwrap_type(kind.__origin__)
        return inner, [*metadata, *kind.__metadata__]
    members = [each for each in get_args(kind) if each is not NoneType]
    if get_origin(kind) in (Union, UnionType) and len(members) == 1:
        return _unwrap_type(members[0])
    return kind, []


class _ParsedType(click.ParamType):
    name = "value"

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"{value!r}: expected {error}.", param, ctx)


def _click_type(kind: Any, option: Option) -> click.ParamType:
    if option.parse is not None:
        return _ParsedType(option.parse)
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if kind not in (int, float):
        return click.STRING
    least, most = (low if high is None else high for low, high in ((option.ge, option.gt), (option.le, option.lt)))
    if least is None and most is None:
        return click.INT if kind is int else click.FLOAT
    range_type: Any = click.IntRange if kind is int else click.FloatRange
    return range_type(least, most, min_open=option.gt is not None, max_open=option.lt is not None)


class _Option(click.Option):
    """An option that lists the names in its help only when the help is shown."""

    def __init__(self, *arguments: Any, listed: Callable[[], Iterable[str]] | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._listed = listed

    def get_help_record(self, context: click.Context) -> tuple[str, str] | None:
        names: list[str] = []
        if self._listed is not None and self.help and "{names}" in self.help:
            with contextlib.suppress(ImportError):  # the installation has no pipelines
                names = [*self._listed()]
            self.help = self.help.replace("{names}", f": {', '.join(names)}" if names else "")
        return super().get_help_record(context)


def _complete(
    names: Callable[[], Iterable[str]] | None, place: bool, context: click.Context, param: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Complete `names` (and TOML files if the value may be a path), or files and folders if the value is a path."""
    matching = [] if names is None else [name for name in names() if name.startswith(begun)]
    if place and names is not None:
        matching += sorted(glob.glob(f"{glob.escape(begun)}*.toml"))
    return [CompletionItem(name) for name in matching] or [CompletionItem(begun, type="file")] * place


def _run(function: Callable[..., Any], values: dict[str, Any]) -> None:
    about["run"] = str(values.get("run") or "")
    as_json, quiet, verbose, _ = (values.pop(name) for name in _SHELL_ONLY)
    arguments, options = _split_arguments(function, values)
    with output(quiet=quiet, verbose=verbose, results="stderr" if as_json else "stdout"):
        try:
            with contextlib.nullcontext() if options.get("watch") else show_spinner(f"{function.__name__}: at work"):
                body = function(*arguments, **options)
        except ExtremisError:
            if verbose:
                messages.print(traceback.format_exc())
            raise
    if as_json and body is not None:
        print_json(body)


def _split_arguments(function: Callable[..., Any], values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and the options to call `function` with.

    --start-timeout is added to the Beam options, where the start-up check of the workers finds it.
    """
    arguments: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments += values.pop(name)
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            arguments.append(values.pop(name))
    if values.get("start_timeout") is not None:
        values["beam_options"] = (*values["beam_options"], f"--start_timeout={values['start_timeout']:g}")
    return arguments, values


def _command_line(line: click.Command, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the command-line arguments for the given arguments and options; None means the default."""
    params, places = {param.name: param for param in line.params}, list[str]()
    for name, value in values.items():
        param = params[name]
        if value is None:
            continue
        if not isinstance(param, click.Option):
            places += map(format_argument, value if param.nargs == -1 else [value])
        elif param.is_flag:
            yield from [_flag(name)] if value else param.secondary_opts[:1]
        elif param.multiple:
            yield from (f"{_flag(name)}={each}" for each in changes(value))
        else:
            yield f"{_flag(name)}={format_argument(value)}"
    yield from ("--", *places)


def changes(settings: Mapping[str, Any] | Sequence[str]) -> tuple[str, ...]:
    """Return changes to a recipe in the format of --set: KEY=VALUE, with the value in TOML (JSON values are TOML)."""
    if isinstance(settings, Mapping):
        return tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())
    return tuple(settings)


def format_argument(value: Any) -> str:
    """Format a value for the command line: 0.55,1.5 for (0.55, 1.5), and key=id,text=query for a mapping."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={part}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return os.fspath(value) if _is_place(value) else str(value)


def _is_place(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def comma_list(
    parse: Callable[[str], Any], expected: str, count: int | None = None
) -> Callable[[str], tuple[Any, ...]]:
    """Return a parser for comma-separated values; `parse` parses one value, or raises ValueError."""

    def read(text: str) -> tuple[Any, ...]:
        try:
            values = tuple(parse(part.strip()) for part in text.split(",") if part.strip())
        except ValueError:
            values = ()
        if not values or count not in (None, len(values)):
            raise ValueError(expected)
        return values

    return read


@contextlib.contextmanager
def naming_arguments() -> Iterator[None]:
    """In errors that the block raises, replace command-line flags with the arguments of the Python functions."""
    try:
        yield
    except ExtremisError as error:
        error.args = (name_arguments(str(error)),)
        raise


@functools.cache
def _arguments_by_flag() -> Mapping[str, str]:
    """Return the Python argument for each flag, read from the commands' source files without loading a command."""
    arguments = {"--from": "from_run"}  # `from` is a Python keyword
    for path in (Path(__file__).parent / "commands").glob("*.py"):
        for name, switch in re.findall(r"^    (\w+): .* = (True|False)?", path.read_text("utf-8"), re.MULTILINE):
            flag = name.replace("_", "-")
            arguments |= {f"--{flag}": f"{name}=True" if switch else name, f"--no-{flag}": f"{name}=False"}
    return arguments


def name_arguments(message: str) -> str:
    """Replace command-line flags in a message with Python arguments."""
    arguments = _arguments_by_flag()

    def state(typed: re.Match[str]) -> str:
        flag, key, value, number = typed.groups()
        if flag not in arguments:  # perhaps an option of Beam
            return typed[0]
        argument = arguments[flag]
        if key is not None:
            return f"set={{{_literal(key)}: {_literal(value)}}}" if argument == "set" else f'{argument}="{key}={value}"'
        return argument if number is None else f"{argument}={_literal(number)}"

    return _FLAG_IN_TEXT.sub(state, message)


def _literal(word: str) -> str:
    number = re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", word)
    return word if number else {"true": "True", "false": "False"}.get(word, json.dumps(word))
