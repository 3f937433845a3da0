"""Texts that Python programs hold, in lists, arrays and Series of any library."""

from collections.abc import Iterable, Mapping, Set
from typing import Any

from schemas.errors import InputError

TEXTS = "a text or a place, a list, Series or array of texts, a data frame or Arrow table, or a list of dictionaries"


def items_of(values: Any) -> list[Any] | None:
    """Return the items of a list, a Series, an array or another iterable; None for texts, sets, tables and all else."""
    is_table = hasattr(type(values), "columns") or getattr(values, "ndim", 1) != 1
    if is_table or isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        return None
    return [*(values.to_pylist() if hasattr(values, "to_pylist") else values)]  # Arrow has items of its own


def require_texts(items: Iterable[Any], place: str) -> None:
    """Raise InputError, which names the item, if an item is not a string that UTF-8 can encode."""
    for number, text in enumerate(items):
        if not isinstance(text, str):
            raise InputError(f"{place}[{number}]: expected a string, got {type(text).__name__}: {text!r:.80}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"half a surrogate pair at character {error.start}"
            raise InputError(
                f"{place}[{number}]: {half}. Leave it out, or replace it."
            ) from None
