"""Writers of predictions, as JSON lines, Parquet, a TREC run or a SciPy matrix: one file, published when complete."""

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from scipy import sparse

from schemas import storage
from schemas.errors import InputError
from schemas.tables import PAD

_ENDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".trec": "trec", ".run": "trec", ".npz": "npz"}
_TAG = "extremis"


class Writer(ABC):
    """Base of writers: takes predictions batch by batch. `path`: the file in the making; `label_keys` [L]."""

    def __init__(self, path: str, label_keys: pa.Array) -> None:
        self._path, self._label_keys = path, label_keys

    @abstractmethod
    def write(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> None:
        """Write label ids int64 [B, k], best first and filled with PAD, and scores float32 [B, k] of queries `keys` [B]."""

    @abstractmethod
    def close(self) -> None:
        """Complete the file."""

    def _keys_of(self, ids: np.ndarray) -> tuple[np.ndarray, list[str]]:
        """Return the number of labels of each row [B], and the keys of all of them in order."""
        present = ids != PAD
        return present.sum(axis=1), self._label_keys.take(pa.array(ids[present])).to_pylist()


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
        counts, names = self._keys_of(ids)
        start = 0
        for key, count, row, row_scores in zip(keys.to_pylist(), counts.tolist(), ids, scores, strict=True):
            present = row != PAD
            body = {
                "key": key,
                "labels": names[start : start + count],
                "scores": [float(f"{score:.7g}") for score in row_scores[present].tolist()],
                "label_ids": row[present].tolist(),
            }
            self._file.write(json.dumps(body, ensure_ascii=False) + "\n")
            start += count


class Trec(_Lines):
    """Writer of lines `query Q0 label rank score tag`, rank from 1, for trec_eval and pytrec_eval."""

    def write(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> None:
        counts, names = self._keys_of(ids)
        queries = np.repeat(np.asarray(keys.to_pylist(), object), counts).tolist()
        present = ids != PAD
        ranks = np.cumsum(present, axis=1)[present].tolist()
        for query, label, rank, score in zip(queries, names, ranks, scores[present].tolist(), strict=True):
            if len(query.split()) != 1 or len(label.split()) != 1:
                raise InputError(
                    f"a TREC run separates its fields by blanks: the keys {query!r} and {label!r} cannot both be "
                    "written. Write .jsonl, .parquet or .npz instead."
                )
            self._file.write(f"{query} Q0 {label} {rank} {score:.9g} {_TAG}\n")


class Parquet(Writer):
    """Writer of columns key string, labels list<string>, scores list<float>, label_ids list<int64>."""

    _schema = pa.schema(
        [
            pa.field("key", pa.string(), nullable=False),
            pa.field("labels", pa.list_(pa.string()), nullable=False),
            pa.field("scores", pa.list_(pa.float32()), nullable=False),
            pa.field("label_ids", pa.list_(pa.int64()), nullable=False),
        ]
    )

    def __init__(self, path: str, label_keys: pa.Array) -> None:
        super().__init__(path, label_keys)
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")

    def write(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> None:
        present = ids != PAD
        offsets = pa.array(np.concatenate([[0], np.cumsum(present.sum(axis=1))]).astype(np.int32))
        flat = pa.array(ids[present])
        columns = [pc.cast(self._label_keys.take(flat), pa.string()), pa.array(scores[present], pa.float32()), flat]
        lists = [pa.ListArray.from_arrays(offsets, column) for column in columns]
        self._writer.write_table(pa.Table.from_arrays([keys, *lists], schema=self._schema))

    def close(self) -> None:
        self._writer.close()


class Matrix(Writer):
    """Writer for `scipy.sparse.load_npz`: CSR [N, L] float32, row n the n-th query, its columns in ascending order.

    All predictions are kept in memory until the file is written.
    """

    def __init__(self, path: str, label_keys: pa.Array) -> None:
        super().__init__(path, label_keys)
        self._batches: list[sparse.csr_array] = []

    def write(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> None:
        present = ids != PAD
        row_ends = np.concatenate([[0], np.cumsum(present.sum(axis=1))])
        values = scores[present].astype(np.float32), ids[present], row_ends
        self._batches.append(sparse.csr_array(values, shape=(len(ids), len(self._label_keys))))

    def close(self) -> None:
        empty = sparse.csr_array((0, len(self._label_keys)), dtype=np.float32)
        matrix = sparse.csr_matrix(sparse.vstack([empty, *self._batches], format="csr"))
        matrix.sort_indices()
        with open(self._path, "wb") as file:
            sparse.save_npz(file, matrix, compressed=False)


_WRITERS: dict[str, Callable[[str, pa.Array], Writer]] = {
    "jsonl": JsonLines,
    "trec": Trec,
    "parquet": Parquet,
    "npz": Matrix,
}
