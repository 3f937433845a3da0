"""Options: frozen, typed and checked when they are made; a wrong one is an error that says which and why."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import InputError


class Options(BaseModel):
    """Base of every set of options: no key that it does not know, finite numbers, no change once it is made."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Checked = TypeVar("Checked", bound=Options)


def check(kind: type[Checked], values: Mapping[str, Any]) -> Checked:
    """`values` as options of `kind`. Raises InputError: for each fault the option, what is wrong, the value."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise InputError("; ".join(fault_text(fault) for fault in error.errors()) + ".") from None


def fault_text(fault: Mapping[str, Any]) -> str:
    """One of pydantic's faults as a clause: a validator's own words, or the option, what it should be, what it is."""
    if fault["type"] == "value_error":
        return str(fault["msg"]).removeprefix("Value error, ")
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where}: {str(fault['msg']).lower()}, got {fault['input']!r}"
