"""Writers of predictions, as JSON lines, Parquet, a TREC run or a SciPy matrix: one file, published when complete."""

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import sparse

from schemas import storage
from schemas.errors import InputError
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


class Writer(ABC):
    """Base of writers: takes predictions batch by batch. `path`: the file in the making; `label_keys` [L]."""

    def __init__(self, path: str, label_keys: pa.Array) -> None:
        self._path, self._label_keys = path, label_keys

    @abstractmethod
    def write(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> None:
        """Write label ids int64 [B, k], best first, PAD at the end, and scores float32 [B, k] of queries `keys` [B]."""

    @abstractmethod
    def close(self) -> None:
        """Complete the file."""

    def _table(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> pa.Table:
        """Make rows of a key, the keys, scores and ids of its labels, without pads."""
        present = ids != PAD
        offsets = pa.array(_row_ends(present).astype(np.int32))
        flat = pa.array(ids[present])
        labels = self._label_keys.take(flat).cast(pa.string())
        columns = [labels, pa.array(scores[present], pa.float32()), flat]
        lists = [pa.ListArray.from_arrays(offsets, column) for column in columns]
        return pa.Table.from_arrays([keys, *lists], schema=_SCHEMA)


@contextlib.contextmanager
def open_writer(out: str, form: str | None, label_keys: pa.Array) -> Iterator[Writer]:
    """Open a writer whose file is published at `out` when the block ends without an error.

    Raises InputError where neither `form` nor the name says what to write, StorageError.
    """
    form = form or next((form for end, form in _ENDS.items() if out.endswith(end)), None)
    if form is None:
        raise InputError(f"{out}: its name does not say what to write ({', '.join(_ENDS)}). Say so with --to FORM.")
    with storage.writing(out) as path:
        writer = _WRITERS[form](path, label_keys)
        try:
            yield writer
        except BaseException:
            with contextlib.suppress(Exception):
                writer.close()
            raise
        writer.close()


class _Lines(Writer):
    """Base of writers of text lines."""

    def __init__(self, path: str, label_keys: pa.Array) -> None:
        super().__init__(path, label_keys)
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115

    def close(self) -> None:
        self._file.close()


class JsonLines(_Lines):
    """Writer of {"key", "labels": [keys], "scores": [...], "label_ids": [...]} per query."""

    def write(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> None:
        for row in self._table(keys, ids, scores).to_pylist():
            row["scores"] = [float(f"{score:.7g}") for score in row["scores"]]
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")


class Trec(_Lines):
    """Writer of lines `query Q0 label rank score tag`, rank from 1, for trec_eval and pytrec_eval."""

    def write(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> None:
        for row in self._table(keys, ids, scores).to_pylist():
            query = row["key"]
            for rank, (label, score) in enumerate(zip(row["labels"], row["scores"], strict=True), 1):
                if len(query.split()) != 1 or len(label.split()) != 1:
                    raise InputError(
                        f"a TREC run separates its fields by blanks: the keys {query!r} and {label!r} cannot both be "
                        "written. Write .jsonl, .parquet or .npz instead."
                    )
                self._file.write(f"{query} Q0 {label} {rank} {score:.9g} {_TAG}\n")


class Parquet(Writer):
    """Writer of columns key string, labels list<string>, scores list<float>, label_ids list<int64>."""

    def __init__(self, path: str, label_keys: pa.Array) -> None:
        super().__init__(path, label_keys)
        self._writer = pq.ParquetWriter(path, _SCHEMA, compression="zstd")

    def write(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> None:
        self._writer.write_table(self._table(keys, ids, scores))

    def close(self) -> None:
        self._writer.close()


class Matrix(Writer):
    """Writer for `scipy.sparse.load_npz`: CSR [N, L] float32, row n the n-th query, its columns in ascending order.

    All predictions are kept in memory until the file is written.
    """

    def __init__(self, path: str, label_keys: pa.Array) -> None:
        super().__init__(path, label_keys)
        self._batches = [sparse.csr_array((0, len(label_keys)), dtype=np.float32)]

    def write(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> None:
        present = ids != PAD
        values = scores[present].astype(np.float32), ids[present], _row_ends(present)
        self._batches.append(sparse.csr_array(values, shape=(len(ids), len(self._label_keys))))

    def close(self) -> None:
        matrix = sparse.csr_matrix(sparse.vstack(self._batches, format="csr"))
        matrix.sort_indices()
        with open(self._path, "wb") as file:
            sparse.save_npz(file, matrix, compressed=False)


def _row_ends(present: np.ndarray) -> np.ndarray:
    """Return the end of each row among all labels, from 0: int64 [B + 1]."""
    return np.concatenate([[0], np.cumsum(present.sum(axis=1))])


_WRITERS: dict[str, Callable[[str, pa.Array], Writer]] = {
    "jsonl": JsonLines,
    "trec": Trec,
    "parquet": Parquet,
    "npz": Matrix,
}
