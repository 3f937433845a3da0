"""Texts and rows that Python programs hold: lists, arrays and Series, and data frames and tables of any library."""

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

from schemas.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

TEXTS = "a list, Series or array of texts, a data frame or Arrow table, or a list of dictionaries"


def items_of(values: Any) -> list[Any] | None:
    """Return the items of a list, a Series, an array or another iterable; None for texts, sets, tables and all else."""
    is_table = hasattr(type(values), "columns") or getattr(values, "ndim", 1) != 1
    if isinstance(values, str | bytes | Mapping | Set) or is_table:
        return None
    if hasattr(values, "to_pylist"):  # of Arrow
        return list(values.to_pylist())
    return [*values] if isinstance(values, Iterable) else None


def require_texts(items: Iterable[Any], place: str) -> None:
    """Raise InputError, which names the item, if an item is not a string that UTF-8 can encode."""
    for number, text in enumerate(items):
        if not isinstance(text, str):
            raise InputError(f"{place}[{number}]: expected a string, got {type(text).__name__}: {text!r:.80}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{place}[{number}]: half a surrogate pair at character {error.start}, which is no text. Leave it out, "
                'as in text.encode("utf-8", "ignore").decode().'
            ) from None


def table_of(rows: Any, place: str = "input", expected: str = TEXTS) -> "pa.Table":
    """Convert a data frame or table, or a list of texts, of pairs of text and label, or of dictionaries, to a table.

    Errors contain `place` and what is `expected`. Raises InputError.
    """
    import pyarrow as pa

    listed = items_of(rows)
    if listed is None and (isinstance(rows, Mapping) or not hasattr(type(rows), "columns")):
        raise InputError(f"{place}: expected {expected}, got {type(rows).__name__}.")
    try:
        if listed is None:
            return pa.Table.from_pandas(rows, preserve_index=False) if hasattr(rows, "iloc") else pa.table(rows)
        if not listed or any(isinstance(row, str) for row in listed):
            require_texts(listed, place)
            return pa.table({"text": pa.array(listed, pa.string())})
        if all(isinstance(row, list | tuple) and len(row) == 2 for row in listed):
            texts, named = zip(*listed, strict=True)
            return pa.table({"text": list(texts), "label" if isinstance(named[0], str) else "labels": list(named)})
        for number, row in enumerate(listed):
            if not isinstance(row, Mapping):
                raise InputError(f"{place}[{number}]: expected {expected}, got {type(row).__name__}: {row!r:.80}")
        names = dict.fromkeys(name for row in listed for name in row)  # Arrow would read the names of the first row
        return pa.table({name: [row.get(name) for row in listed] for name in names})
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise InputError(f"{place}: {type(rows).__name__} cannot be read as a table: {reason}.") from None
