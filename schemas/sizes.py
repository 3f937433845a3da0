"""Sizes in bytes and times, parsed; sizes and counts in words. Help needs them: they load little."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from schemas.errors import InputError

PATIENCE = "EXTREMIS_PATIENCE"  # environment variable: how long storage is tried again in an outage, such as 30m
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str) -> int:
    """Parse `8GiB`, `500MB`, `1.5 TiB` or a plain number of bytes. Raises InputError."""
    return int(_parse(text.upper(), _UNITS, repr(text), "8GiB or 500MB"))


def parse_seconds(text: str, name: str) -> float:
    """Parse `90s`, `30m`, `1.5h`, `7d` or a plain number of seconds. Raises InputError, which begins with `name`."""
    return _parse(text, {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}, name, "90s, 30m or 7d")


def _parse(text: str, units: Mapping[str, int], name: str, examples: str) -> float:
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in units:
        expected = f"a number with a unit, for example {examples}"
        raise InputError(f"{name}: expected {expected}.", expected=expected)
    return float(match[1]) * units[match[2]]


def say_count(done: int, total: int | None) -> str:
    """Format progress, such as `3 of 8`; without `total`, only the number done."""
    return f"{done:,}" + ("" if total is None else f" of {total:,}")


def say_bytes(count: float) -> str:
    """Format bytes in a readable unit, such as `7.9 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


T = TypeVar("T")


def batch_by_size(items: Iterable[T], size_of: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Yield `items` in lists; a list ends as soon as its total size reaches `least`. The last list may be smaller."""
    batch, size = list[T](), 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if size >= least:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
