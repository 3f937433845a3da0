"""Sizes in bytes, as people write and read them."""

from pydantic import ByteSize, TypeAdapter, ValidationError

from schemas.errors import InputError


def parse_bytes(text: str) -> int:
    """Parse `8GiB`, `500MB`, `1.5 TiB` or a plain number of bytes. Raises InputError."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise InputError(f"{text!r} is no size: expected a number with a unit, for example 8GiB or 500MB.") from None


def say_bytes(count: float) -> str:
    """Format bytes for people, as `7.9 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError
