"""Data at hand in Python as an input of `shard`: rows, tables and data sets, written for as long as they are read."""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.errors import InputError

_SPLITS = ("train", "val", "validation", "dev", "test", "labels")


@contextlib.contextmanager
def as_source(data: Any) -> Iterator[str]:
    """Yield where `data` can be read: a path or URL as it is, else a folder that is there until the block ends.

    data: rows (dictionaries, or pairs of text and label), an Arrow table, a pandas frame, a Hugging Face data set; or
    these by split: {"train": …, "test": …, "labels": …}. Raises InputError for anything else.
    """
    if isinstance(data, str | PathLike):
        yield str(data)
        return
    with tempfile.TemporaryDirectory(prefix="extremis-input-") as folder:
        if hasattr(data, "save_to_disk"):
            data.save_to_disk(folder)
        else:
            splits = data if isinstance(data, Mapping) else {"train": data}
            if not {*splits} <= {*_SPLITS}:
                names = ", ".join(map(str, splits))
                raise InputError(f"input: expected splits among {', '.join(_SPLITS)}, got {names}.")
            for name, rows in splits.items():
                _write(Path(folder) / name, rows)
        yield folder


def _write(folder: Path, rows: Any) -> None:
    if hasattr(rows, "save_to_disk"):
        rows.save_to_disk(str(folder))
        return
    folder.mkdir()
    table = _table(rows)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)


def _table(rows: Any) -> pa.Table:
    """Return `rows` as a table. Raises InputError."""
    if isinstance(rows, pa.Table):
        return rows
    if hasattr(rows, "iloc"):
        return pa.Table.from_pandas(rows, preserve_index=False)
    if not isinstance(rows, Iterable):
        raise InputError(f"input: expected rows, a table or a data set, got {type(rows).__name__}.")
    listed = list(rows)
    if listed and all(isinstance(row, list | tuple) and len(row) == 2 for row in listed):
        texts, named = zip(*listed, strict=True)
        return pa.table({"text": list(texts), "label" if isinstance(named[0], str) else "labels": list(named)})
    if not listed or not all(isinstance(row, Mapping) for row in listed):
        raise InputError("input: expected rows as dictionaries (text, label or labels), or as pairs of text and label.")
    return pa.Table.from_pylist(listed)
