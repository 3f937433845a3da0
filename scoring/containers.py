"""Texts and rows that Python programs hold, in lists, arrays, Series, frames and tables of any library; and HTML."""

import contextlib
import html
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import ExtremisError, InputError

if TYPE_CHECKING:
    import pyarrow as pa

_EXPECTED = (
    "a list, Series or array of texts, a data frame or table, or rows as dictionaries or as pairs of text and label"
)
_SPLITS = ("train", "val", "validation", "dev", "test", "labels")
_ROW = r"\b(\w+)(?:/data)?-\d+-of-\d+\.arrow, line ([\d,]+)"  # of a file that `input_url` writes


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
            raise InputError(f"{place}[{number}]: {half}. Leave it out, or replace it.") from None


@contextlib.contextmanager
def input_url(data: Any) -> Iterator[str]:
    """Yield a URL to read `data` from: a path or URL unchanged, else a folder that exists until the block ends.

    data: rows (dictionaries, or pairs of text and label), texts, an Arrow table, a data frame, a Hugging Face data set,
    or one of these per split: {"train": …, "test": …, "labels": …}, or {"texts": …}. Raises InputError for others.
    """
    if isinstance(data, str | PathLike):
        yield str(data)
        return
    with tempfile.TemporaryDirectory(prefix="extremis-input-") as folder:
        if hasattr(data, "save_to_disk"):
            data.save_to_disk(folder)
        else:
            splits = data if isinstance(data, Mapping) else {"train": data}
            if not {*splits} <= {*_SPLITS, "texts"}:
                names = ", ".join(map(str, splits))
                raise InputError(f"input: expected splits among {', '.join(_SPLITS)}, got {names}.")
            for name, rows in splits.items():
                _write(Path(folder) / name, rows)
        try:
            yield folder
        except ExtremisError as error:  # names what the caller has: rows, not files
            said = str(error).replace(f"{folder}/", "").replace(folder, "input")
            error.args = (re.sub(_ROW, lambda row: f"{row[1]}[{int(row[2].replace(',', '')) - 1}]", said),)
            raise


def _write(folder: Path, rows: Any) -> None:
    if hasattr(rows, "save_to_disk") and not isinstance(rows, Mapping):
        rows.save_to_disk(str(folder))
        return
    import pyarrow as pa

    from pipelines.formats.from_columns import check_names

    folder.mkdir()
    table = _table(rows)
    check_names("input", table.column_names)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)


def _table(rows: Any) -> "pa.Table":
    """Convert `rows` to a table. Raises InputError."""
    import pyarrow as pa

    listed = items_of(rows)
    try:
        if listed is None and hasattr(rows, "iloc"):
            return _of_columns([(str(name), rows.iloc[:, place]) for place, name in enumerate(rows.columns)])
        if listed is None:
            return pa.table(None if isinstance(rows, Mapping) else rows)
        if not listed or any(isinstance(row, str) for row in listed):
            require_texts(listed, "input")
            return pa.table({"text": pa.array(listed, pa.string())})
        if all(isinstance(row, list | tuple) and len(row) == 2 for row in listed):
            texts, named = zip(*listed, strict=True)
            return _of_columns([("text", texts), ("label" if isinstance(named[0], str) else "labels", named)])
        names = dict.fromkeys(name for row in listed for name in row)  # Arrow would read the names of the first row
        return _of_columns([(str(name), [row.get(name) for row in listed]) for name in names])
    except (pa.ArrowException, AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise InputError(f"input: expected {_EXPECTED}, got {type(rows).__name__} ({reason}).") from None


def _of_columns(columns: Sequence[tuple[str, Any]]) -> "pa.Table":
    import pyarrow as pa

    from pipelines.formats.base import shown

    arrays = []
    for name, values in columns:
        try:
            arrays.append(pa.array(values, from_pandas=True))
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            half = f" (half a surrogate pair in {shown(error.object)})" if isinstance(error, UnicodeEncodeError) else ""
            raise InputError(
                f"input: the column {shown(name)} cannot be read: {' '.join(str(error).split())[:200]}{half}. Expected "
                "values of one type: texts, whole numbers, or lists of these."
            ) from None
    return pa.table(arrays, [name for name, _ in columns])


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
