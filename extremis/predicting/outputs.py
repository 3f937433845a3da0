"""Files of predictions: JSON lines, Parquet, a TREC run or a SciPy matrix; one file, published when complete."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import sparse

from schemas import storage
from schemas.errors import InputError
from schemas.ragged import offsets_of
from schemas.shard_files.parquet import list_column
from schemas.tables import PAD

_ENDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".trec": "trec", ".run": "trec", ".npz": "npz"}
_TAG = "extremis"
_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("labels", pa.list_(pa.string()), nullable=False),
        pa.field("scores", pa.list_(pa.float32()), nullable=False),
        pa.field("label_ids", pa.list_(pa.int64()), nullable=False),
    ]
)

Write = Callable[[pa.Table], None]  # takes predictions batch by batch, as `prediction_table` makes them


@contextlib.contextmanager
def open_writer(out: str, form: str | None, labels: int) -> Iterator[Write]:
    """Open a writer of predictions out of L labels, whose file is published at `out` when the block ends without error.

    Raises InputError where neither `form` nor the name says what to write, StorageError.
    """
    form = form or next((form for end, form in _ENDS.items() if out.endswith(end)), None)
    if form is None:
        raise InputError(f"{out}: its name does not say what to write ({', '.join(_ENDS)}). Say so with --to FORM.")
    with storage.writing(out) as path, _FORMS[form](path, labels) as write:
        yield write


def prediction_table(keys: pa.Array, ids: np.ndarray, scores: np.ndarray, label_keys: pa.Array) -> pa.Table:
    """Make a row of key, labels' keys, scores and label ids for each query, without pads.

    `keys` [B]; label ids int64 [B, k], best first, PAD at the end; `scores` float32 [B, k]; `label_keys` [L].
    """
    present = ids != PAD
    offsets = pa.array(offsets_of(present.sum(axis=1)).astype(np.int32))
    flat = pa.array(ids[present])
    columns = [label_keys.take(flat).cast(pa.string()), pa.array(scores[present], pa.float32()), flat]
    lists = [pa.ListArray.from_arrays(offsets, column) for column in columns]
    return pa.Table.from_arrays([keys, *lists], schema=_SCHEMA)


@contextlib.contextmanager
def _write_lines(format_query: Callable[[dict[str, Any]], str], path: str, labels: int) -> Iterator[Write]:
    with open(path, "w", encoding="utf-8") as file:
        yield lambda table: file.writelines(map(format_query, table.to_pylist()))


def _json_line(query: dict[str, Any]) -> str:
    """Format {"key", "labels": [keys], "scores": [...], "label_ids": [...]}."""
    query["scores"] = [float(f"{score:.7g}") for score in query["scores"]]
    return json.dumps(query, ensure_ascii=False) + "\n"


def _trec_lines(query: dict[str, Any]) -> str:
    """Format lines `query Q0 label rank score tag`, rank from 1, for trec_eval and pytrec_eval."""
    key, lines = query["key"], ""
    for rank, (label, score) in enumerate(zip(query["labels"], query["scores"], strict=True), 1):
        if len(key.split()) != 1 or len(label.split()) != 1:
            raise InputError(
                f"a TREC run separates its fields by blanks: the keys {key!r} and {label!r} cannot both be "
                "written. Write .jsonl, .parquet or .npz instead."
            )
        lines += f"{key} Q0 {label} {rank} {score:.9g} {_TAG}\n"
    return lines


@contextlib.contextmanager
def _write_parquet(path: str, labels: int) -> Iterator[Write]:
    """Write columns key string, labels list<string>, scores list<float>, label_ids list<int64>."""
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
        yield writer.write_table


@contextlib.contextmanager
def _write_matrix(path: str, labels: int) -> Iterator[Write]:
    """Write for `scipy.sparse.load_npz`: CSR [N, L] float32, row n the n-th query, its columns in ascending order.

    All predictions are kept in memory until the file is written.
    """
    batches = [sparse.csr_array((0, labels), dtype=np.float32)]

    def write(table: pa.Table) -> None:
        ids, offsets = list_column(table, "label_ids")
        values = list_column(table, "scores").values, ids, offsets
        batches.append(sparse.csr_array(values, shape=(table.num_rows, labels)))

    yield write
    matrix = sparse.csr_matrix(sparse.vstack(batches, format="csr"))
    matrix.sort_indices()
    # As narrow as they can be, however the parts were.
    kind = sparse.get_index_dtype(maxval=max(labels, matrix.nnz))
    matrix.indices, matrix.indptr = matrix.indices.astype(kind), matrix.indptr.astype(kind)
    with open(path, "wb") as file:
        sparse.save_npz(file, matrix, compressed=False)


_FORMS: dict[str, Callable[[str, int], contextlib.AbstractContextManager[Write]]] = {
    "jsonl": functools.partial(_write_lines, _json_line),
    "trec": functools.partial(_write_lines, _trec_lines),
    "parquet": _write_parquet,
    "npz": _write_matrix,
}
