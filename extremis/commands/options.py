"""What several commands take alike, and how words of a command line become values."""

from typing import Any

import click

from schemas.errors import InputError

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object last.")
beam_tail = click.argument("beam_options", nargs=-1, type=click.UNPROCESSED)


class Count(click.ParamType):
    """A whole number, which may be written as 370e6."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if number < 1 or number != int(number) or number > 1e15:
            self.fail(f"{value!r} is no whole number of at least 1, such as 370e6.", param, context)
        return int(number)


class Depths(click.ParamType):
    """Where rankings are cut: whole numbers with commas between, such as 20,100."""

    name = "depths"
    most = 1000

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() and 1 <= int(part) <= self.most for part in parts):
            self.fail(f"{value!r}: expected numbers from 1 to {self.most} with commas between.", param, context)
        return tuple(map(int, parts))


def parse_propensity(text: str | None) -> tuple[float | None, float | None]:
    """(A, B) of `A,B`. Raises InputError."""
    if text is None:
        return None, None
    try:
        a, b = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--propensity {text!r}: expected two numbers A,B, for example 0.55,1.5.") from None
    return a, b


def parse_names(option: str, text: str) -> list[str]:
    """The names of `astra,renee`. Raises InputError where there is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"{option} {text!r}: expected names with commas between, for example astra,renee.")
    return names


def parse_numbers(option: str, text: str) -> tuple[float, ...]:
    """The numbers of `0.5,0.9`. Raises InputError."""
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"{option} {text!r}: expected numbers with commas between, for example 0.5,0.9.") from None
