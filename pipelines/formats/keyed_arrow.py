"""Arrow streams, as Hugging Face `datasets` saves them to disk: columns, with the names of class labels."""

import contextlib
import json
from collections.abc import Iterator, Sequence

import pyarrow as pa

from schemas import storage
from schemas.errors import InputError

ARROW = "arrow"


def field_names(url: str) -> list[str]:
    """Return the names of the columns. Raises InputError, StorageError."""
    with _open(url) as stream:
        return list(stream.schema.names)


def read_blocks(url: str, block_rows: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield blocks of `block_rows` rows (the last may be shorter) of those of `columns` that are there.

    Class labels are their names. Raises InputError: no Arrow stream, or a damaged one; StorageError.
    """
    with _open(url) as stream:
        present = [name for name in columns if name in stream.schema.names]
        classes = _class_names(stream.schema)
        pending: list[pa.RecordBatch] = []
        rows = 0
        for batch in _batches(url, stream):
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


def _batches(url: str, stream: pa.RecordBatchStreamReader) -> Iterator[pa.RecordBatch]:
    try:
        yield from stream
    except (pa.ArrowException, OSError) as error:
        raise _damaged(url, error) from None


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
def _open(url: str) -> Iterator[pa.RecordBatchStreamReader]:
    try:
        file = storage.open_read(url)
    except FileNotFoundError:
        raise InputError(f"{url}: no such file.") from None
    with file:
        try:
            stream = pa.ipc.open_stream(pa.PythonFile(file, mode="r"))
        except (pa.ArrowException, OSError) as error:
            raise _damaged(url, error) from None
        with stream:
            yield stream


def _damaged(url: str, error: Exception) -> InputError:
    return InputError(f"{url}: not an Arrow stream, or a damaged one: {str(error)[:200]}. Save the data set again.")
