"""Functions of the Python API: each states its parameters once, for Python and for the command line.

A parameter's annotation gives its type and bounds; a line under "Options:" in the docstring gives its meaning. With a
parameter `options`, a pydantic model of a pipeline, the fields of the model are keyword arguments, too.
"""

import difflib
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar, Union, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, Field, SkipValidation, create_model
from pydantic.fields import FieldInfo

from extremis.console import Event, output, results_first
from schemas.errors import InputError, option
from schemas.options import AS_TEXT, BYTES, COMMAS, Options, Shown, check

P = ParamSpec("P")
R = TypeVar("R")
Progress = bool | Callable[[Event], object]
_PROGRESS = "    progress: True: as on the command line; False: no progress; or a function, called with every event."


class _Own(Options):
    """Base of the model of a function's own parameters, which may be data in memory."""

    model_config = ConfigDict(arbitrary_types_allowed=True, validate_default=True)


def function(implementation: Callable[P, R]) -> Callable[P, R]:
    """Make `implementation` a function of the API, which raises InputError for unknown or invalid arguments."""
    described = Described(implementation)

    @functools.wraps(implementation)
    def call(*places: P.args, **named: P.kwargs) -> R:
        return described.call(places, named)  # type: ignore[no-any-return]

    call.__signature__ = described.signature  # type: ignore[attr-defined]
    call.__doc__ = described.documentation()
    call.described = described  # type: ignore[attr-defined]
    return call


class Described:
    """A function with its parameters: `own` from its signature, and `fields`, these and those of its options' model."""

    def __init__(self, implementation: Callable[..., Any]) -> None:
        self.name, self.implementation = implementation.__name__, implementation
        stated = inspect.signature(implementation).parameters
        self.own = {
            name: parameter
            for name, parameter in stated.items()
            if name not in ("options", "progress") and parameter.kind is not parameter.VAR_KEYWORD
        }
        options = unwrap(stated["options"].annotation)[0] if "options" in stated else None
        self.options: type[Options] | None = options
        self.text, helps = _read_docstring(inspect.getdoc(implementation) or "")
        self.fields: dict[str, FieldInfo] = {}
        for name, parameter in self.own.items():
            kind: Any = parameter.annotation
            if parameter.kind is parameter.VAR_POSITIONAL:
                kind = tuple[kind, ...]  # type: ignore[valid-type]
            field = FieldInfo.from_annotated_attribute(
                kind, ... if parameter.default is parameter.empty else parameter.default
            )
            inner = [each for each in unwrap(kind)[1] if isinstance(each, FieldInfo)]  # within a type or None
            meaning = next((each.description for each in inner if each.description), field.description)
            field.description = helps.get(name) or meaning
            self.fields[name] = field
        for name, field in ({} if options is None else options.model_fields).items():
            if (field.alias or name) not in self.own and field.description:  # else no option
                self.fields[field.alias or name] = field
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
            for name, field in self.fields.items()
            if name not in self.own
        ]
        kept = [parameter for parameter in stated.values() if parameter.kind is not parameter.VAR_KEYWORD]
        returned = inspect.signature(implementation).return_annotation
        self.signature = inspect.Signature([*kept, *more], return_annotation=returned)

    @functools.cached_property
    def model(self) -> type[Options]:
        """Model of the function's own parameters."""
        fields: dict[str, Any] = {name: (self.fields[name].annotation, self.fields[name]) for name in self.own}
        return create_model(self.name, __base__=_Own, **fields)

    def call(self, places: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call the function from Python; an argument that is None has its default."""
        for name in named:
            if name not in self.signature.parameters:
                near = difflib.get_close_matches(name, self.fields, 1)
                meant = f"did you mean {near[0]!r}? " if near else ""
                known = ", ".join(self.signature.parameters)
                raise InputError(f"{self.name}: unknown option {name!r}; {meant}known options: {known}.")
        values = self.signature.bind(*places, **named).arguments
        progress, options = values.pop("progress", True), values.pop("options", None)
        shown = ", ".join([*map(_short, places), *(f"{name}={_short(value)}" for name, value in named.items())])
        listener = progress if callable(progress) else None
        command = f"extremis.{self.name}({shown})"
        with output(listener=listener, quiet=progress is False, results="nowhere", command=command), results_first():
            return self.run(values, options)

    def run(self, values: Mapping[str, Any], options: Options | None = None) -> Any:
        """Check `values` by parameter, and call the function; None: not given.

        `start_timeout` becomes an option of Beam, where the start-up check of the workers finds it.
        """
        given = {name: value for name, value in values.items() if value is not None}
        own = check(self.model, {name: value for name, value in given.items() if name in self.own})
        arguments = {name: getattr(own, name) for name in self.own}
        if arguments.get("start_timeout") is not None:
            timeout = f"--start_timeout={arguments['start_timeout']:g}"
            arguments["beam_options"] = (*arguments["beam_options"], timeout)
        if self.options is not None:
            fields = {} if options is None else options.model_dump(exclude_unset=True, by_alias=True)
            fields |= {name: value for name, value in given.items() if name not in self.own}
            arguments["options"] = check(self.options, fields)
        places = [
            place
            for name, parameter in self.own.items()
            if parameter.kind is not parameter.KEYWORD_ONLY
            for place in (arguments.pop(name) if parameter.kind is parameter.VAR_POSITIONAL else [arguments.pop(name)])
        ]
        return self.implementation(*places, **arguments)

    def documentation(self) -> str:
        """Return the docstring with one line per option."""
        lines = []
        for name, field in self.fields.items():
            if name not in self.own or self.own[name].kind is inspect.Parameter.KEYWORD_ONLY:
                meaning = (field.description or "").replace("{names}", "").format_map(Spelled())
                stated = "" if field.default in (None, False, (), "") or "Default:" in meaning else field.default
                lines.append(f"    {name}: {meaning}" + (f" Default: {stated}." if stated != "" else ""))
        head, mark, examples = self.text.partition("\n\nExample")
        return "\n".join([f"{head}\n\nOptions:", *lines, _PROGRESS + mark + examples])


class Spelled(dict[str, str]):
    """Options that a help text refers to, as {memory}, in the spelling of the front end."""

    def __missing__(self, name: str) -> str:
        return option(name)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"<{type(value).__name__}>"


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring without its options, and the help of each option."""
    head, mark, rest = text.partition("\n\nOptions:\n")
    section, _, tail = rest.partition("\n\n")
    lines = re.sub(r"\n {5,}", " ", section).splitlines()
    return (f"{head}\n\n{tail}" if mark else text), dict(line.strip().split(": ", 1) for line in lines)


def facts_of(field: FieldInfo) -> tuple[Any, Shown, list[Any]]:
    """Return the type of a field without None, how it is shown, and its bounds."""
    kind, inner = unwrap(field.annotation)
    found = [*field.metadata, *inner]
    bounds = [bound for each in found for bound in (each.metadata if isinstance(each, FieldInfo) else [each])]
    return kind, next((each for each in found if isinstance(each, Shown)), Shown()), bounds


def unwrap(kind: Any) -> tuple[Any, list[Any]]:
    """Return a type without None and annotations, and the annotations."""
    if get_origin(kind) is Annotated:
        inner, metadata = unwrap(kind.__origin__)
        return inner, [*metadata, *kind.__metadata__]
    members = [each for each in get_args(kind) if each is not NoneType]
    if get_origin(kind) in (Union, UnionType) and len(members) == 1:
        return unwrap(members[0])
    return kind, []


# Types of parameters that several functions share.


def _changes(settings: Any) -> Any:
    """Return changes to a recipe as KEY=VALUE, with the value in TOML; a JSON value is one."""
    if isinstance(settings, Mapping):
        return tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())
    return tuple(settings) if isinstance(settings, list) else settings


def _recipe_names() -> list[str]:
    from trainer.recipe_files import AUTO_RECIPE, recipe_names

    return [AUTO_RECIPE, *recipe_names()]


class Columnar(Protocol):
    """An Arrow table, or a data frame of a library that has Arrow's interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Place = Annotated[str | PathLike[str], AS_TEXT]  # a file, a directory, or an object-store prefix
Url = Annotated[Place, Shown("URL")]
PlaceOrData = Annotated[str | PathLike[str] | Iterable[object] | Columnar, SkipValidation]  # a place, or data in memory
Recipe = Annotated[Place, Shown(names=_recipe_names), Field(description="A recipe's name or TOML file.")]
Settings = Annotated[
    Mapping[str, object] | Sequence[str],  # {"train.epochs": 5}, or ["train.epochs=5"]
    BeforeValidator(_changes),
    Shown("KEY=VALUE", repeated=True),
    Field(description="Change the recipe, e.g. train.epochs=5."),
]
Names = Annotated[Sequence[str], COMMAS, Shown("NAME,...")]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Size = Annotated[int | str, BYTES, Shown("SIZE")]  # bytes, or "8GiB"
StartTimeout = Annotated[
    float,
    Field(
        ge=0,
        description="Seconds to wait for an answer from the Flink or Spark workers before the job starts. Default: 60. "
        "0: do not wait.",
    ),
]
Exact = Annotated[bool, Field(description="Score every label, even if the export has an index.")]
Embedder = Annotated[
    Place,
    Field(
        description="Path or hub name of the model that computed DATA's dense vectors. Default: the name in the export."
    ),
]
Threads = Annotated[Positive, Field(description="Number of threads. Default: all cores.")]
Scores = Annotated[Names, Field(description="Scores from outside that EXPORT may import, as module:name.")]
BeamOptions = Annotated[Sequence[str], Field(description="Options for Beam, which follow -- on the command line.")]
