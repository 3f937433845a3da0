"""Options: frozen, typed and validated on creation; an error names the invalid option and the reason."""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from os import PathLike, fspath
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from schemas.errors import InputError
from schemas.sizes import parse_bytes

DEVICES = r"^(auto|cpu|cuda(:\d{1,3})?)$"  # names of a device to compute on
MOST_THREADS = 4096  # limit for each kind of thread in a process
MOST_RATE = 10_000  # limit for learning rates
_SHOWN = 200  # characters of a value that a message shows
_LONG = re.compile(r"(\S{200})\S{100,}")
# What pydantic says, as what is expected: by the type of its error, or by its phrase.
_EXPECTED = {
    "missing": "a value",
    "extra_forbidden": "no such option",
    "int_parsing_size": "a whole number of at most 63 bits",
}
_PHRASES = {
    "^input should be ": "",
    "^(greater|less) than": r"a number \g<0>",
    r"^(\w+) should ": r"a \1 that should ",
}


class Options(BaseModel):
    """Base of all sets of options: refuses unknown keys, infinite numbers, and booleans in place of numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _plain_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse whole numbers of more than 64 bits, which arrays cannot contain, and true and false for 1 and 0."""
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63 and info.field_name != "seed":
            raise PydanticCustomError("bits", f"input should be {_EXPECTED['int_parsing_size']}")
        kind = cls.model_fields[str(info.field_name)].annotation
        inner = value.values() if get_origin(kind) is dict and isinstance(value, Mapping) else [value]
        if bool not in (kind, *get_args(kind)) and any(isinstance(each, bool) for each in inner):
            raise PydanticCustomError("truth_value", "input should be a value other than true or false")
        return value


def key(default: Any, meaning: str, **bounds: Any) -> Any:
    """Return a field of options, with its meaning for people, and bounds such as `ge=0`."""
    return Field(default, description=meaning, **bounds)


Checked = TypeVar("Checked", bound=Options)


def check(kind: type[Checked], values: Mapping[str, Any]) -> Checked:
    """Return `values` as options of `kind`.

    Raises InputError, which names the option, problem and value of each fault.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = [as_input_error(fault) for fault in error.errors()]
    if len(faults) > 1:
        faults[0].args = (" ".join(map(str, faults)),)
    raise faults[0]


def as_input_error(fault: Mapping[str, Any]) -> InputError:
    """Return a pydantic error as an InputError: a validator's message, or option, expected value and given value."""
    named = [part for part in fault["loc"] if not isinstance(part, int)]  # and not the place in a list
    where = ".".join(map(str, named)) or None
    said = str(fault["msg"])
    if fault["type"] == "value_error":
        said = _LONG.sub(r"\1…", said.removeprefix("Value error, "))
        return InputError(f"{said}.", parameter=where)
    expected = _EXPECTED.get(fault["type"]) or re.sub(", (got|unable to) .*", "", said[:1].lower() + said[1:])
    for pattern, replacement in _PHRASES.items():
        expected = re.sub(pattern, replacement, expected)
    got = repr(fault["input"])
    return InputError(parameter=where, expected=expected, got=got if len(got) <= _SHOWN else got[:_SHOWN] + "…")


def is_number(value: Any) -> bool:
    """Return whether `value` is a real number, also of NumPy; booleans and NaN are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """Return `value` as an int. Raises InputError unless it is a whole number, also of NumPy, of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(parameter=name, got=f"{value!r:.80}", expected=f"a whole number, {least} or more")
    return int(value)


@dataclass(frozen=True)
class Shown:
    """How a command line shows an option, in addition to its name, type and help.

    `names`: values that help lists in place of {names} and a shell completes. `place`: the value is a file or a folder.
    `repeated`: the flag is repeated for each value.
    """

    metavar: str | None = None
    names: Callable[[], Iterable[str]] | None = None
    place: bool = False
    repeated: bool = False


def _as_text(value: Any) -> Any:
    """Return a path as text, and a mapping as in key=id,text=query."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={part}" for key, part in value.items())
    return fspath(value) if isinstance(value, PathLike) else value


def _bytes(value: Any) -> Any:
    """Return a size such as 8GiB as a number."""
    try:
        return parse_bytes(value) if isinstance(value, str) else value
    except InputError as error:
        raise PydanticCustomError("size", f"input should be {error.expected}") from None


AS_TEXT, BYTES = BeforeValidator(_as_text), BeforeValidator(_bytes)
Place = Annotated[str, AS_TEXT]  # or a path
Url = Annotated[Place, Shown(metavar="URL", place=True)]


def _parts(value: Any) -> Any:
    """Split a text at commas."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


COMMAS = BeforeValidator(_parts)
Size = Annotated[int, BYTES, Shown("SIZE")]  # or a text, such as 8GiB
Fields = Annotated[str, AS_TEXT, Shown(metavar="NAME=NAME,...")]  # or a mapping, {"key": "id"}


def _require_device(name: str) -> str:
    if not re.match(DEVICES, name):
        raise PydanticCustomError("device", "input should be auto, cpu, cuda, or a GPU's number, such as cuda:1")
    return name


def _encoding(name: str) -> str:
    """Return the usual name of an encoding of text."""
    try:
        "".encode(name)  # refuses codecs that are not for text, such as hex
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        expected = "input should be an encoding, such as cp1252, utf-16 or gb18030"
        raise PydanticCustomError("encoding", expected) from None


Encoding = Annotated[str, AfterValidator(_encoding), Shown("NAME")]
Device = Annotated[str, AfterValidator(_require_device), Shown("auto|cpu|cuda|cuda:N")]
AnyDevice = Annotated[
    Device, Field(description="Device to use. Default: auto, which takes a GPU if the machine has one.")
]

# A module has EXTENSION, write_shard and open_shard; open_shard returns an OpenShard.
SINKS = {
    "parquet": "schemas.shard_files.parquet",
    "webdataset": "schemas.shard_files.webdataset",
}


def _require_sink(name: str) -> str:
    if name not in SINKS:
        raise PydanticCustomError("sink", "input should be one of {names}", {"names": ", ".join(map(repr, SINKS))})
    return name


Sink = Annotated[str, AfterValidator(_require_sink), Shown(names=lambda: SINKS)]
