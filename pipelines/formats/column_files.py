"""Files of columns as record batches: Parquet, and the Arrow streams that Hugging Face `datasets` saves."""

import contextlib
import json
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.formats import records
from schemas import storage
from schemas.errors import InputError

PARQUET = "parquet"
ARROW = "arrow"


def arrow_names(url: str) -> list[str]:
    """Return the names of the columns. Raises InputError, StorageError."""
    with _open_arrow(url) as stream:
        return list(stream.schema.names)


def read_arrow(url: str, block_rows: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield blocks of `block_rows` rows (the last may be shorter) of those of `columns` that are there.

    Class labels are their names. Raises InputError: no Arrow stream, or a damaged one; StorageError.
    """
    with _open_arrow(url) as stream:
        present = [name for name in columns if name in stream.schema.names]
        classes = _class_names(stream.schema)
        pending: list[pa.RecordBatch] = []
        rows = 0
        for batch in _arrow_batches(url, stream):
            named = [_with_names(batch[name], classes.get(name)) for name in present]
            pending.append(pa.record_batch(named, names=present))
            rows += batch.num_rows
            while rows >= block_rows:
                whole = pa.Table.from_batches(pending).combine_chunks()
                yield whole.slice(0, block_rows).combine_chunks().to_batches()[0]
                rows -= block_rows
                pending = whole.slice(block_rows).to_batches()
        if rows:
            yield pa.Table.from_batches(pending).combine_chunks().to_batches()[0]


def _arrow_batches(url: str, stream: pa.RecordBatchStreamReader) -> Iterator[pa.RecordBatch]:
    try:
        yield from stream
    except (pa.ArrowException, OSError) as error:
        raise _damaged_arrow(url, error) from None


def _class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the names of the classes of each column whose numbers are class labels."""
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
    try:
        file = storage.open_read(url)
    except FileNotFoundError:
        raise InputError(f"{url}: no such file.") from None
    with file:
        try:
            stream = pa.ipc.open_stream(pa.PythonFile(file, mode="r"))
        except (pa.ArrowException, OSError) as error:
            raise _damaged_arrow(url, error) from None
        with stream:
            yield stream


def _damaged_arrow(url: str, error: Exception) -> InputError:
    return InputError(f"{url}: not an Arrow stream, or a damaged one: {str(error)[:200]}. Save the data set again.")


def parquet_names(url: str) -> list[str]:
    """Return the names of the columns, from the footer. Raises InputError, StorageError."""
    with _open_parquet(url) as file:
        return list(file.schema_arrow.names)


def read_parquet(url: str, block_rows: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield blocks of exactly `block_rows` rows (the last may be shorter) of those of `columns` that are there.

    Raises InputError: not Parquet, or damaged; StorageError.
    """
    pending: list[pa.RecordBatch] = []
    rows = 0
    for batch in _parquet_batches(url, min(block_rows, 1 << 16), columns):
        pending.append(batch)
        rows += batch.num_rows
        while rows >= block_rows:
            ready = _concat(pending)
            yield ready.slice(0, block_rows)
            pending, rows = [ready.slice(block_rows)], rows - block_rows
    if rows:
        yield _concat(pending)


def _parquet_batches(url: str, rows: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    with _open_parquet(url) as file:
        present = [name for name in columns if name in file.schema_arrow.names]
        try:
            for group in range(file.num_row_groups):  # one at a time: Arrow joins no dictionaries within lists
                yield from file.iter_batches(rows, row_groups=[group], columns=present, use_threads=False)
        except MemoryError:  # Arrow's own is one, too
            raise too_large(url, rows) from None
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _damaged_parquet(url, error) from None


def check_columns(url: str, *required: Sequence[str]) -> None:
    """Raise InputError where the file at `url` has no column of one of the groups `required`; types are for later."""
    names = parquet_names(url)
    for group in required:
        if not set(group) & set(names):
            present = ", ".join(records.shown(name) for name in names[:20])
            raise InputError(
                f"{url}: no column {' or '.join(map(repr, group))}; found: {present}. If it is called otherwise, say "
                "so with --fields, as in --fields key=id,text=query."
            )


@contextlib.contextmanager
def _open_parquet(url: str) -> Iterator[pq.ParquetFile]:
    try:
        length = storage.size(url)
    except FileNotFoundError:
        raise InputError(f"{url}: no such file.") from None
    try:
        file = pq.ParquetFile(storage.RangeReader(url, length), pre_buffer=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged_parquet(url, error) from None
    with file:
        yield file


def _damaged_parquet(url: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split()).rstrip(".")[:200]
    return InputError(f"{url}: not a Parquet file, or a damaged one: {reason}. Copy it again.")


def too_large(url: str, rows: int) -> InputError:
    return InputError(
        f"{url}: a batch of {rows:,} rows does not fit into memory: a few bytes of it stand for very many. Write it "
        "again with shorter values, or give more memory."
    )


def _concat(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
