"""Predictions as JSON lines, Parquet, a TREC run or a SciPy matrix: one file, there whole or not at all."""

import contextlib
import io
import json
import shutil
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas import storage
from schemas.errors import InputError
from schemas.tables import PAD

FORMS = ("jsonl", "parquet", "trec", "npz")
_ENDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".trec": "trec", ".run": "trec", ".npz": "npz"}
_TAG = "extremis"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the time in a zip file: the same bytes for the same predictions


class Writer(ABC):
    """Takes predictions batch by batch; `path` is where the file is being made. `label_keys` [L]."""

    def __init__(self, path: str, label_keys: pa.Array) -> None:
        self._path, self._label_keys = path, label_keys

    @abstractmethod
    def write(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> None:
        """Queries `keys` [B], label ids int64 [B, k] best first, -1 pads, and scores float32 [B, k]."""

    @abstractmethod
    def close(self) -> None:
        """Complete the file."""

    def _named(self, ids: np.ndarray) -> tuple[np.ndarray, list[str]]:
        """(how many labels each row has [B], their keys laid end to end)."""
        found = ids != PAD
        return found.sum(axis=1), self._label_keys.take(pa.array(ids[found])).to_pylist()


@contextlib.contextmanager
def open_writer(out: str, form: str | None, label_keys: pa.Array) -> Iterator[Writer]:
    """A writer whose file is published at `out` when the block ends without an error.

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
    """Writers of text."""

    def __init__(self, path: str, label_keys: pa.Array) -> None:
        super().__init__(path, label_keys)
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115

    def close(self) -> None:
        self._file.close()


class JsonLines(_Lines):
    """{"key", "labels": [keys], "scores": [...], "label_ids": [...]} a query."""

    def write(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> None:
        counts, names = self._named(ids)
        at = 0
        for key, count, row, row_scores in zip(keys.to_pylist(), counts.tolist(), ids, scores, strict=True):
            found = row != PAD
            body = {
                "key": key,
                "labels": names[at : at + count],
                "scores": [float(f"{score:.7g}") for score in row_scores[found].tolist()],
                "label_ids": row[found].tolist(),
            }
            self._file.write(json.dumps(body, ensure_ascii=False) + "\n")
            at += count


class Trec(_Lines):
    """`query Q0 label rank score tag`, rank from 1, as trec_eval and pytrec_eval read it."""

    def write(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> None:
        counts, names = self._named(ids)
        queries = np.repeat(np.asarray(keys.to_pylist(), object), counts).tolist()
        found = ids != PAD
        ranks = (np.cumsum(found, axis=1)[found]).tolist()
        for query, label, rank, score in zip(queries, names, ranks, scores[found].tolist(), strict=True):
            if len(query.split()) != 1 or len(label.split()) != 1:
                raise InputError(
                    f"a TREC run separates its fields by blanks: the keys {query!r} and {label!r} cannot both be "
                    "written. Write .jsonl, .parquet or .npz instead."
                )
            self._file.write(f"{query} Q0 {label} {rank} {score:.9g} {_TAG}\n")


class Parquet(Writer):
    """Columns key string, labels list<string>, scores list<float>, label_ids list<int64>."""

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
        found = ids != PAD
        offsets = pa.array(np.concatenate([[0], np.cumsum(found.sum(axis=1))]).astype(np.int32))
        flat = pa.array(ids[found])
        columns = [pc.cast(self._label_keys.take(flat), pa.string()), pa.array(scores[found], pa.float32()), flat]
        lists = [pa.ListArray.from_arrays(offsets, column) for column in columns]
        self._writer.write_table(pa.Table.from_arrays([keys, *lists], schema=self._schema))

    def close(self) -> None:
        self._writer.close()


class Matrix(Writer):
    """What `scipy.sparse.load_npz` opens: CSR [N, L] float32, row n the n-th query, its columns in ascending order.

    Memory is bounded by a batch and the N row ends; the entries wait in scratch files.
    """

    def __init__(self, path: str, label_keys: pa.Array) -> None:
        super().__init__(path, label_keys)
        self._indices, self._data = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._ends: list[np.ndarray] = []
        self._entries = 0

    def write(self, keys: pa.Array, ids: np.ndarray, scores: np.ndarray) -> None:
        # Pads sort to the end.
        order = np.argsort(np.where(ids == PAD, np.iinfo(np.int64).max, ids), axis=1, kind="stable")
        ids, scores = np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)
        found = ids != PAD
        self._indices.write(ids[found].astype(self._kind).tobytes())
        self._data.write(scores[found].astype(np.float32).tobytes())
        ends = self._entries + np.cumsum(found.sum(axis=1))
        self._ends.append(ends)
        self._entries = int(ends[-1]) if len(ends) else self._entries

    def close(self) -> None:
        indptr = np.concatenate([[0], *self._ends])
        if self._entries < 1 << 31 and self._kind == np.int32:
            indptr = indptr.astype(np.int32)
        shape = np.array([len(indptr) - 1, len(self._label_keys)], np.int64)
        with zipfile.ZipFile(self._path, "w") as archive:
            for name, array in (("format", np.array(b"csr")), ("shape", shape), ("indptr", indptr)):
                _entry(archive, name, array.dtype, array.shape, io.BytesIO(array.tobytes()))
            for name, kind, file in (("indices", self._kind, self._indices), ("data", np.float32, self._data)):
                file.seek(0)
                _entry(archive, name, np.dtype(kind), (self._entries,), file)
        self._indices.close()
        self._data.close()

    @property
    def _kind(self) -> type[np.signedinteger[Any]]:
        return np.int32 if len(self._label_keys) < 1 << 31 else np.int64


def _entry(archive: zipfile.ZipFile, name: str, dtype: np.dtype, shape: tuple[int, ...], content: IO[bytes]) -> None:
    """One array of an .npz, whose bytes `content` gives."""
    with archive.open(zipfile.ZipInfo(f"{name}.npy", _EPOCH), "w", force_zip64=True) as out:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(out, header)
        shutil.copyfileobj(content, out, 1 << 20)


_WRITERS: dict[str, Callable[[str, pa.Array], Writer]] = {
    "jsonl": JsonLines,
    "trec": Trec,
    "parquet": Parquet,
    "npz": Matrix,
}
