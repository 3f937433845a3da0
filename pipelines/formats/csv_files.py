"""CSV and TSV as columns of text: a header, fields in quotes that may hold line ends, one row a record."""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from itertools import islice

import pyarrow as pa

from pipelines.formats import lines
from pipelines.formats.rejects import Reason, Reject
from schemas.errors import InputError

CSV = rf"(?:csv|tsv){lines.CODEC}"
COUNT = "\x01fields"  # column with the number of fields of each row
_DELIMITERS = ",;\t|"  # of a .csv; a .tsv has tabs

csv.field_size_limit(lines.MAX_LINE_BYTES)


def is_csv(url: str) -> bool:
    """Tell whether the name of a file is that of a CSV or TSV."""
    return re.search(rf"\.{CSV}$", url) is not None


def csv_names(url: str) -> list[str]:
    """Return the names of the columns, from the header. Raises InputError: no text in UTF-8, or a name twice."""
    return _header(url, _records(url))


def read_csv(url: str, block_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield blocks of `block_rows` rows (the last may be shorter): columns of strings by name, and COUNT.

    Raises InputError: not CSV in UTF-8, cut off; StorageError.
    """
    records = _records(url)
    names = _header(url, records)
    pending: list[list[str]] = [[]]  # a header is a row of nothing, so that rows are counted as lines are
    while True:
        rows = [*pending, *islice(records, block_rows - len(pending))]
        if not rows:
            return
        pending = []
        counts = [len(row) for row in rows]
        columns = [[row[place] if place < len(row) else None for row in rows] for place in range(len(names))]
        arrays = [pa.array(column, pa.string()) for column in columns]
        yield pa.record_batch([*arrays, pa.array(counts, pa.int32())], names=[*names, COUNT])


def whole_rows(raw: pa.RecordBatch, first_row: int, file: str) -> tuple[pa.RecordBatch, list[int], list[Reject]]:
    """Return the rows with as many fields as the header, their places, and rejects of others that are not empty."""
    width = raw.num_columns - 1
    counts = raw[COUNT].to_pylist()
    kept = [place for place, count in enumerate(counts) if count == width]
    rejects = [
        Reject(file, first_row + place + 1, Reason.MALFORMED, f"expected {width} fields, as in the header, got {count}")
        for place, count in enumerate(counts)
        if count not in (0, width)
    ]
    rows = raw.select(range(width))
    return rows if len(kept) == raw.num_rows else rows.take(pa.array(kept, pa.int64())), kept, rejects


def split_lists(column: pa.Array) -> pa.ListArray:
    """Read a column of texts as lists: `["a", "b"]`, or values with | or ; between them."""
    return pa.array([_listed(text) for text in column.to_pylist()], pa.list_(pa.string()))


def _listed(text: str | None) -> list[str]:
    if not text:
        return []
    if text.startswith("[") and text.endswith("]"):
        try:
            return [str(part) for part in json.loads(text)]
        except ValueError:
            pass
        quoted = re.findall(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')\s*(?:,|$)""", text[1:-1])
        if quoted or not text[1:-1].strip():
            return [re.sub(r"\\(.)", r"\1", double or single) for double, single in quoted]
    return [part.strip() for part in re.split(r"[|;]", text) if part.strip()]


def _header(url: str, records: Iterator[list[str]]) -> list[str]:
    names = [name.strip() for name in next(records, [])]
    if len({*names}) < len(names):
        raise InputError(f"{url}: a column is named twice in its header: {', '.join(names)[:200]}. Rename one.")
    return names


def _records(url: str) -> Iterator[list[str]]:
    text = io.TextIOWrapper(io.BufferedReader(_Content(url)), "utf-8", newline="")
    try:
        sample = text.buffer.peek(1 << 16)[: 1 << 16]
        line = sample.split(b"\n")[0].decode("utf-8", "replace")
        tabs = re.search(rf"\.tsv{lines.CODEC}$", url) is not None
        delimiter = "\t" if tabs else max(_DELIMITERS, key=line.count)
        yield from csv.reader(text, delimiter=delimiter, strict=not tabs, quoting=csv.QUOTE_NONE if tabs else 0)
    except csv.Error as error:
        raise InputError(f"{url}: not CSV: {error}. Are its quotes closed? Write it again.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{url}: not UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8.") from None


class _Content(io.RawIOBase):
    """Content of a file, decompressed, without UTF-8's byte order mark."""

    def __init__(self, url: str) -> None:
        self._chunks = lines.content(url)
        self._rest = next(self._chunks, b"").removeprefix(codecs.BOM_UTF8)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)
