"""Options: frozen, typed and validated on creation; an error names the invalid option and the reason."""

import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Annotated, Any, TypeVar, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from schemas.errors import InputError

DEVICES = r"^(auto|cpu|cuda(:\d{1,3})?)$"  # names of a device to compute on
MOST_THREADS = 4096  # limit for each kind of thread in a process
MOST_RATE = 10_000  # limit for learning rates
_SHOWN = 200  # characters of a value that a message shows
_LONG = re.compile(r"(\S{200})\S{100,}")


class Options(BaseModel):
    """Base of all sets of options: refuses unknown keys, infinite numbers, and booleans in place of numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _within_64_bits(cls, values: Any) -> Any:
        """Refuse whole numbers that do not fit into 64 bits, because arrays cannot contain them."""
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63 and name != "seed":
                raise ValueError(f"{name}: the number has {value.bit_length()} bits; expected at most 63")
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false in place of 1 and 0, also inside a table of numbers."""
        kind = cls.model_fields[str(info.field_name)].annotation
        inner = value.values() if get_origin(kind) is dict and isinstance(value, Mapping) else [value]
        if kind is not bool and any(isinstance(each, bool) for each in inner):
            raise PydanticCustomError("truth_value", "input should not be true or false")
        return value


def option(default: Any, meaning: str, **bounds: Any) -> Any:
    """Return a field of Options, with its meaning for people, and bounds such as `ge=0`."""
    return Field(default, description=meaning, **bounds)


Checked = TypeVar("Checked", bound=Options)


def check(kind: type[Checked], values: Mapping[str, Any]) -> Checked:
    """Return `values` as options of `kind`.

    Raises InputError, which names the option, problem and value of each fault.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise InputError("; ".join(fault_text(fault) for fault in error.errors()) + ".") from None


def fault_text(fault: Mapping[str, Any]) -> str:
    """Describe a pydantic error in one clause: the validator's message, or option, expected value and given value."""
    if fault["type"] == "value_error":
        return _LONG.sub(r"\1…", str(fault["msg"]).removeprefix("Value error, "))
    where = ".".join(str(part) for part in fault["loc"])
    text = repr(fault["input"])
    wanted = "input should be a whole number of at most 63 bits"
    message = wanted if fault["type"] == "int_parsing_size" else str(fault["msg"]).lower()
    return f"{where}: {message}, got {text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}"


def is_number(value: Any) -> bool:
    """Return whether `value` is a real number, also of NumPy; booleans and NaN are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """Return `value` as an int. Raises InputError unless it is a whole number, also of NumPy, of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} = {value!r:.80}: expected a whole number, {least} or more.")
    return int(value)


# A module has EXTENSION, write_shard and open_shard; open_shard returns an OpenShard.
SINKS = {
    "parquet": "schemas.shard_files.parquet",
    "webdataset": "schemas.shard_files.webdataset",
}


def _require_sink(name: str) -> str:
    if name not in SINKS:
        raise ValueError(f"sink = {name!r}: expected one of {', '.join(map(repr, SINKS))}")
    return name


Sink = Annotated[str, AfterValidator(_require_sink)]
