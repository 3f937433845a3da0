"""Rows in other places than files of a format: in Python, a spreadsheet or standard input; and tables as HTML."""

import contextlib
import datetime
import html
import io
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import ExtremisError, InputError, missing_extra, option

if TYPE_CHECKING:
    import pyarrow as pa

_EXPECTED = (
    "a list, Series or array of texts, a data frame or table, or rows as dictionaries or as pairs of text and label"
)
_SPLITS = ("train", "val", "validation", "dev", "test", "labels")
SPREADSHEET, STANDARD = ".xlsx", "-"  # the end of a URL; standard input
_NAMES = {"text": "input.txt", "jsonl": "input.jsonl", "csv": "input.csv"}  # names of a copy of standard input
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
def input_url(data: Any, standard: str | None = None) -> Iterator[str]:
    """Yield a URL to read `data` from: a path or URL unchanged, else a folder that exists until the block ends.

    standard: format of standard input, which "-" then means. data: the URL of a spreadsheet (.xlsx), rows
    (dictionaries, or pairs of text and label), texts, an Arrow table, a data frame, a Hugging Face data set, or one of
    these per split: {"train": …, "test": …, "labels": …}, or {"texts": …}. Raises InputError for others.
    """
    place, numbers = str(data) if isinstance(data, str | PathLike) else "", list[int]()
    is_sheet, is_standard = place.endswith(SPREADSHEET), place == STANDARD and standard is not None
    if isinstance(data, str | PathLike) and not (is_sheet or is_standard):
        yield place
        return
    if is_sheet:
        data, numbers = _read_sheet(place)
    with tempfile.TemporaryDirectory(prefix="extremis-input-") as folder:
        if is_standard:
            _copy_standard_input(Path(folder), str(standard))
        elif hasattr(data, "save_to_disk"):
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
            said = str(error).replace(f"{folder}/", "").replace(folder, place or "input")
            said = said.replace(_NAMES[str(standard)], "standard input") if is_standard else said

            def named(row: re.Match[str]) -> str:
                number = int(row[2].replace(",", "")) - 1
                return f"{place}, row {numbers[number]:,}" if is_sheet else f"{row[1]}[{number}]"

            error.args = (re.sub(_ROW, named, said),)
            raise


def _copy_standard_input(folder: Path, form: str) -> None:
    """Copy standard input to a file in `folder`, named after its format. Raises InputError for a binary format."""
    if form not in _NAMES:
        raise InputError(
            f"{option('form', form)}: standard input can have the format {' or '.join(_NAMES)}. Give a file instead."
        )
    if sys.stdin is None:
        raise InputError("standard input is closed. Open it, or give a file.")
    with (folder / _NAMES[form]).open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        if not file.tell():
            raise InputError("standard input is empty. Give it texts, or give a file.")


def _read_sheet(url: str) -> tuple["pa.Table", list[int]]:
    """Return the rows below the header of a spreadsheet's first sheet as texts, and their numbers in the sheet.

    Empty rows are left out. Raises InputError if openpyxl is missing, or the file or its header is damaged;
    StorageError.
    """
    try:
        from openpyxl import load_workbook
    except ImportError:
        raise missing_extra(f"{url}: an .xlsx file needs openpyxl", "xlsx") from None
    import pyarrow as pa

    from pipelines.formats.base import MAX_RATIO, UNSUSPECTED, open_file
    from pipelines.formats.from_columns import check_names

    with open_file(url) as file:
        content = io.BytesIO(file.read())
    try:
        sizes = [(each.file_size, each.compress_size) for each in zipfile.ZipFile(content).infolist()]
        if any(size > max(UNSUSPECTED, MAX_RATIO * packed) for size, packed in sizes):
            raise ValueError("it unpacks to an unusual size")
        sheet = load_workbook(content, read_only=True, data_only=True).worksheets[0]
        header, *rows = ([*map(_cell, row)] for row in sheet.iter_rows(values_only=True))
    except Exception as error:  # openpyxl has no error of its own for most damage
        fault = f"not an .xlsx file with a header, or damaged ({str(error)[:200]})"
        raise InputError(f"{url}: {fault}. Save it again.") from None
    width = max((place + 1 for place, name in enumerate(header) if name), default=0)
    check_names(url, header[:width])
    for number, row in enumerate(rows, 2):
        if any(row[width:]):
            raise InputError(f"{url}, row {number:,}: a cell beside the {width} columns of the header. Give it a name.")
    kept = [(number, row[:width] + [""] * (width - len(row))) for number, row in enumerate(rows, 2) if any(row)]
    columns = [pa.array([row[place] for _, row in kept], pa.string()) for place in range(width)]
    return pa.table(columns, header[:width]), [number for number, _ in kept]


def _cell(value: Any) -> str:
    """Return the value of a cell as text: a whole number without a point, a date as in ISO 8601."""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        value = value.date()
    dated = isinstance(value, datetime.date | datetime.time)
    return "" if value is None else value.isoformat() if dated else str(value)


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
