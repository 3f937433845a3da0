"""Read columnar files as record batches: CSV and TSV, Parquet, and Arrow streams saved by Hugging Face `datasets`.

CSV and TSV files have a header and one row per record; quoted fields may contain line breaks. All CSV and TSV columns
are text.
"""

import codecs
import contextlib
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.formats import lines, records
from schemas import storage
from schemas.errors import InputError
from schemas.table import rechunk

PARQUET = "parquet"
ARROW = "arrow"
CSV = rf"(?:csv|tsv){lines.CODEC}"
COUNT = "\x01fields"  # column with the number of fields of each row
_DELIMITERS = ",;\t|"  # delimiters of a .csv; a .tsv has tabs

csv.field_size_limit(lines.MAX_LINE_BYTES)


def column_names(url: str) -> list[str] | None:
    """Return the column names of a file, or None if its extension does not belong to a format with columns.

    Raises InputError if the content does not match the extension or a header contains a column twice; StorageError.
    """
    if url.endswith(f".{PARQUET}"):
        with open_parquet(url) as file:
            return list(file.schema_arrow.names)
    if url.endswith(f".{ARROW}"):
        with _open_arrow(url) as stream:
            return list(stream.schema.names)
    return _header(url, _records(url)) if is_csv(url) else None


def check_columns(url: str, *required: Sequence[str], example: str = "key=id,text=query") -> None:
    """Raise InputError if a file contains no column from one of the groups in `required`; types are checked later.

    example: a value of --fields to show in the message.
    """
    names = column_names(url)
    for group in required:
        if names is not None and not set(group) & set(names):
            present = ", ".join(records.shown(name) for name in names[:20])
            raise InputError(
                f"{url}: no column {' or '.join(map(repr, group))}; found: {present}. If the column has another name, "
                f"rename it, or give its name with --fields, as in --fields {example}."
            )


def read_arrow(url: str, block_rows: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield blocks of `block_rows` rows (the last may be shorter) with the columns in `columns` that the file contains.

    Class labels are returned as their names. Raises InputError if the file is damaged or not an Arrow stream;
    StorageError.
    """
    with _open_arrow(url) as stream:
        present = [name for name in columns if name in stream.schema.names]
        classes = _class_names(stream.schema)
        named = (
            pa.record_batch([_with_names(batch[name], classes.get(name)) for name in present], names=present)
            for batch in stream
        )
        yield from _in_blocks(named, block_rows)


def _class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the class names of each column that contains class labels."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    named = {}
    for column, feature in features.items():
        inner = feature.get("feature", feature) if isinstance(feature, dict) else feature[0]
        if isinstance(inner, dict) and isinstance(inner.get("names"), list):
            named[column] = inner["names"]
    return named


def _with_names(column: pa.Array, names: list[str] | None) -> pa.Array:
    if names is None:
        return column
    if pa.types.is_list(column.type):
        return pa.ListArray.from_arrays(column.offsets, _with_names(column.values, names))
    return pa.array(names, pa.string()).take(column) if pa.types.is_integer(column.type) else column


@contextlib.contextmanager
def _open_arrow(url: str) -> Iterator[pa.RecordBatchStreamReader]:
    """Open an Arrow stream. Raises InputError, also within the block, if the stream is damaged; StorageError."""
    with lines.open_file(url) as file:
        try:
            with pa.ipc.open_stream(pa.PythonFile(file, mode="r")) as stream:
                yield stream
        except (pa.ArrowException, OSError) as error:
            fault = f"not an Arrow stream, or damaged: {str(error)[:200]}"
            raise InputError(f"{url}: {fault}. Save the data set again.") from None


def read_parquet(url: str, block_rows: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield blocks of exactly `block_rows` rows (the last may be shorter) with the columns in `columns` that exist.

    Raises InputError if the file is damaged or not Parquet; StorageError.
    """
    rows = min(block_rows, 1 << 16)
    with open_parquet(url) as file:
        present = [name for name in columns if name in file.schema_arrow.names]
        # Row groups are read one at a time: Arrow cannot join dictionaries within lists.
        groups = (file.iter_batches(rows, [n], present, use_threads=False) for n in range(file.num_row_groups))
        try:
            yield from _in_blocks(chain.from_iterable(groups), block_rows)
        except MemoryError:  # also Arrow's own error
            raise too_large(url, rows) from None


@contextlib.contextmanager
def open_parquet(url: str, buffer_size: int = 0) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. With a `buffer_size`, column chunks are read in parts and are never loaded as a whole.

    Raises InputError, also within the block, if the file is missing or damaged; StorageError.
    """
    try:
        length = storage.size(url)
    except FileNotFoundError:
        raise InputError(f"{url}: file not found.") from None
    source = storage.RangeReader(url, length)
    try:
        with pq.ParquetFile(source, pre_buffer=not buffer_size, buffer_size=buffer_size) as file:
            yield file
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")[:200]
        raise InputError(f"{url}: not a Parquet file, or damaged: {reason}. Copy the file again.") from None


def too_large(url: str, rows: int) -> InputError:
    return InputError(
        f"{url}: a batch of {rows:,} rows does not fit into memory: its values are much larger after decompression. "
        "Write the file with shorter values, or give more memory."
    )


def _in_blocks(batches: Iterator[pa.RecordBatch], block_rows: int) -> Iterator[pa.RecordBatch]:
    """Regroup the rows into batches of exactly `block_rows` rows (the last may be shorter)."""
    for table in rechunk((pa.Table.from_batches([batch]) for batch in batches), block_rows):
        (block,) = table.to_batches()
        yield block


def is_csv(url: str) -> bool:
    """Return whether the file has the extension of a CSV or TSV file."""
    return re.search(rf"\.{CSV}$", url) is not None


def read_csv(url: str, block_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield blocks of `block_rows` rows (the last may be shorter) with the file's columns as strings, and COUNT.

    Raises InputError if the file is incomplete or not CSV in UTF-8; StorageError.
    """
    records = _records(url)
    names = _header(url, records)
    pending: list[list[str]] = [[]]  # the header counts as an empty row, so that row numbers agree with lines
    while True:
        rows = [*pending, *islice(records, block_rows - len(pending))]
        if not rows:
            return
        pending = []
        counts = [len(row) for row in rows]
        columns = [[row[place] if place < len(row) else None for row in rows] for place in range(len(names))]
        arrays = [pa.array(column, pa.string()) for column in columns]
        yield pa.record_batch([*arrays, pa.array(counts, pa.int32())], names=[*names, COUNT])


def split_lists(column: pa.Array) -> pa.ListArray:
    """Parse a text column into lists: `["a", "b"]`, or values separated by | or ;."""
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
        raise InputError(
            f"{url}: the header names a column twice: {', '.join(names)[:200]}. Rename one of the two columns."
        )
    return names


def _records(url: str) -> Iterator[list[str]]:
    text = _text_lines(url)
    try:
        header = next(text, "")
        tabs = re.search(rf"\.tsv{lines.CODEC}$", url) is not None
        delimiter, rows = "\t" if tabs else max(_DELIMITERS, key=header.count), chain([header], text)
        yield from csv.reader(rows, delimiter=delimiter, strict=not tabs, quoting=csv.QUOTE_NONE if tabs else 0)
    except csv.Error as error:
        raise InputError(f"{url}: not CSV: {error}. Check that all quotes are closed.") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{url}: not UTF-8 text ({error.reason} at byte {error.start}). Save the file as UTF-8."
        ) from None


def _text_lines(url: str) -> Iterator[str]:
    """Yield the lines of UTF-8 text with their line endings, including a lone CR, and without a byte order mark."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=False)
    pending = ""
    for chunk in lines.read_chunks(url):
        *whole, pending = io.StringIO(pending + decoder.decode(chunk), newline="").readlines() or [""]
        yield from whole
        if len(pending) > lines.MAX_LINE_BYTES:
            raise csv.Error(f"a line of more than {lines.MAX_LINE_BYTES:,} characters")
    yield pending + decoder.decode(b"", final=True)
