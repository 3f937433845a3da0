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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
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
    return _header(url, chain.from_iterable(_records(url, 1))) if is_csv(url) else None


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

    Class labels are returned as their names, and -1 as null. Raises InputError if the file is damaged or not an Arrow
    stream; StorageError.
    """
    with _open_arrow(url) as stream:
        present = [name for name in columns if name in stream.schema.names]
        yield from _in_blocks(_with_names((batch.select(present) for batch in stream), stream.schema), block_rows)


def _with_names(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    classes = _class_names(schema)
    for batch in batches:
        for name in classes.keys() & {*batch.schema.names}:
            column, names = batch[name], pa.array(classes[name], pa.string())
            offsets, numbers = list_entries(column) if is_list(column.type) else (None, column)
            if pa.types.is_integer(numbers.type):
                named = names.take(pc.if_else(pc.equal(numbers, -1), None, numbers))
                named = named if offsets is None else pa.LargeListArray.from_arrays(pa.array(offsets), named)
                batch = batch.set_column(batch.schema.get_field_index(name), name, named)
        yield batch


def _class_names(schema: pa.Schema) -> dict[str, list[str]]:
    named = {}
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        for column, feature in features.items():
            inner = feature.get("feature", feature) if isinstance(feature, dict) else feature[0]
            if isinstance(inner, dict) and isinstance(inner.get("names"), list):
                named[column] = inner["names"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        pass
    return named


def is_list(kind: pa.DataType) -> bool:
    """Return whether a type is a list: also a large list, a list of fixed size, or a view."""
    return hasattr(kind, "value_field")


def list_entries(column: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Return (offsets int64 [B + 1], entries) of a column of lists of any kind; null is an empty list."""
    counts = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.concatenate([[0], np.cumsum(counts)]), column.flatten()


@contextlib.contextmanager
def _open_arrow(url: str) -> Iterator[pa.RecordBatchStreamReader]:
    """Open an Arrow stream. Raises InputError, also within the block, if the stream is damaged; StorageError."""
    with lines.open_file(url) as file:
        try:
            file.seek(8 if file.read(6) == b"ARROW1" else 0)  # a file with a footer contains a stream
            with pa.ipc.open_stream(pa.PythonFile(file, mode="r")) as stream:
                check_names(url, stream.schema.names)
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
            yield from _in_blocks(_with_names(chain.from_iterable(groups), file.schema_arrow), block_rows)
        except MemoryError:  # also Arrow's own error
            raise too_large(url, rows) from None


@contextlib.contextmanager
def open_parquet(url: str, buffer_size: int = 0) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. With a `buffer_size`, column chunks are read in parts and are never loaded as a whole.

    Raises InputError, also within the block, if the file is missing or damaged, or names a column twice; StorageError.
    """
    try:
        length = storage.size(url)
    except FileNotFoundError:
        raise InputError(f"{url}: file not found.") from None
    source = storage.RangeReader(url, length)
    try:
        options = {"pre_buffer": not buffer_size, "buffer_size": buffer_size}
        with pq.ParquetFile(source, **options) as file:
            check_names(url, file.schema_arrow.names)
            if not any(pa.types.is_fixed_size_list(field.type) for field in file.schema_arrow):
                yield file
                return
            # Arrow cannot read null in a list that its own schema calls fixed-size. Without that schema, it can.
            footer = io.BytesIO()
            file.metadata.write_metadata_file(footer)
        footer = pa.BufferReader(footer.getvalue().replace(b"ARROW:schema", b"other:schema"))
        with pq.ParquetFile(source, metadata=pq.read_metadata(footer), **options) as file:
            yield file
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")[:200]
        if "list" in reason:
            remedy = "Write a null list as an empty list, or copy a damaged file again."
            raise InputError(f"{url}: Arrow cannot read these lists: {reason}. {remedy}") from None
        raise InputError(f"{url}: not a Parquet file, or damaged: {reason}. Copy the file again.") from None


def check_names(place: str, names: Sequence[str]) -> None:
    """Raise InputError if two columns have one name."""
    for name, count in Counter(names).items():
        if count > 1:
            found = f"{records.shown(name)}; found: {', '.join(names)[:200]}"
            raise InputError(f"{place}: two columns are called {found}. Rename one of the two columns.")


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
    records = chain.from_iterable(_records(url, block_rows))
    names = _header(url, records)
    pending: list[Sequence[str]] = [[]]  # the header counts as an empty row, so that row numbers agree with lines
    while rows := [*pending, *islice(records, block_rows - len(pending))]:
        pending = []
        counts = [len(row) for row in rows]
        columns = [[row[place] if place < len(row) else None for row in rows] for place in range(len(names))]
        arrays = [pa.array(column, pa.string()) for column in columns]
        yield pa.record_batch([*arrays, pa.array(counts, pa.int32())], names=[*names, COUNT])


def _header(url: str, records: Iterator[Sequence[str]]) -> list[str]:
    names = [name.strip() for name in next(records, [])]
    check_names(url, names)
    return names


def _records(url: str, block_rows: int) -> Iterator[list[Sequence[str]]]:
    """Yield some rows at a time. Empty rows follow a row of several lines, so that row numbers agree with lines."""
    line = 0
    try:
        reader = _reader(url)
        while rows := list(islice(reader, block_rows)):
            if reader.line_num - line > len(rows):
                rows = [each for row in rows for each in (row, *[()] * _line_breaks(",".join(row)))]
            line = reader.line_num
            yield rows
    except csv.Error as error:
        with contextlib.suppress(csv.Error):  # find the row: read the file again
            reader, line = _reader(url), 0
            for _ in reader:
                line = reader.line_num
        start = sum(len(text.encode()) for text in islice(_text_lines(url, "utf-8"), line))
        raise InputError(
            f"{url}, line {line + 1:,}: not CSV: {error}, in the row that starts at byte {start:,} of the file. Check "
            "that all quotes are closed."
        ) from None


def _reader(url: str) -> Any:
    text = _text_lines(url)
    header = next(text, "")
    if re.search(rf"\.tsv{lines.CODEC}$", url):
        return csv.reader(chain([header], text), delimiter="\t", quoting=csv.QUOTE_NONE)
    return csv.reader(chain([header], text), delimiter=max(_DELIMITERS, key=header.count), strict=True)


def _line_breaks(text: str) -> int:
    return text.count("\n") + (text.count("\r") - text.count("\r\n") if "\r" in text else 0)


def _text_lines(url: str, encoding: str = "utf-8-sig") -> Iterator[str]:
    """Yield the lines of UTF-8 text with their line endings, including a lone CR, and without a byte order mark."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), translate=False)
    pending, line, place = "", 1, 0
    for chunk in chain(lines.read_chunks(url), [b""]):
        place += len(chunk)
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            line += _line_breaks(pending + error.object[: error.start].decode())
            place += error.start - len(error.object)
            raise InputError(
                f"{url}, line {line:,}: not UTF-8 text ({error.reason} at byte {place:,} of the file). Save the file "
                "as UTF-8."
            ) from None
        *whole, pending = io.StringIO(pending + text, newline="").readlines() or [""]
        yield from whole
        line += len(whole)
        if len(pending) > lines.MAX_LINE_BYTES:
            raise csv.Error(f"a line of more than {lines.MAX_LINE_BYTES:,} characters")
    yield pending
