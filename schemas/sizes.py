"""Parses and formats sizes in bytes, formats counts, and checks for free disk space."""

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from schemas.errors import InputError, RoomError, StorageError

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str) -> int:
    """Parse `8GiB`, `500MB`, `1.5 TiB` or a plain number of bytes. Raises InputError."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise InputError(f"{text!r}: expected a number with a unit, for example 8GiB or 500MB.")
    return int(float(match[1]) * unit)


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


def require_room(url: str, needs: Mapping[str, int], remedy: str) -> None:
    """Refuse to write more than fits into the free space at `url`; `needs`: lower bounds in bytes per kind of content.

    Only local disks report their free space. Raises RoomError, with `remedy` at the end of the message.
    """
    from schemas import storage  # parsing a size needs no fsspec

    free = storage.free_bytes(url)
    if free is None or sum(needs.values()) <= free:
        return
    parts = " and ".join(f"{say_bytes(size)} of {what}" for what, size in needs.items())
    raise RoomError(f"{url}: the command writes at least {parts}, and {say_bytes(free)} are free. {remedy}")


@contextlib.contextmanager
def with_room(url: str, what: str, size: int, remedy: str) -> Iterator[None]:
    """Check that there is space for the block to write about `size` bytes of `what` to a file at `url`.

    The disk of `url` is checked, or of TMPDIR for uploads. Raises RoomError, with `remedy` at the end of the message:
    before the block if space is missing, and inside the block if the disk becomes full.
    """
    from schemas import storage  # parsing a size needs no fsspec

    place = url if storage.is_local(url) else tempfile.gettempdir()
    if place != url:
        remedy = f"Set TMPDIR to a disk with more room. {remedy}"
    require_room(place, {what: size}, remedy)
    try:
        yield
    except StorageError as error:
        if error.__cause__ is None or not storage.is_full(error.__cause__):
            raise
        text = f"{place}: the disk is full: the command writes about {say_bytes(size)} of {what}. {remedy}"
        raise RoomError(text) from error
