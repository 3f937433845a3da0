"""Read a sparse matrix saved by SciPy's `save_npz` block by block, as three streams, and never as a whole.

Nothing is unpickled. Only a matrix in CSR format can be streamed by row, so other formats are rejected.
"""

import ast
import contextlib
import errno
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from pipelines.formats import lines
from schemas.errors import InputError, StorageError
from schemas.ragged import SparseRows

_MEMBERS = ("format", "shape", "indptr", "indices", "data")
_MOST_ENTRIES = 1 << 28  # most entries of a block of rows, because a block is in memory
_SMALL = 1 << 10  # entries of `format` and `shape`; a longer array is invalid
_REMEDY = "Write the matrix with scipy.sparse.save_npz(path, matrix.tocsr())."
_BAD_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, KeyError)


def read_shape(url: str) -> tuple[int, int]:
    """Return (rows, columns) of the matrix at `url`. Raises InputError if there is no CSR matrix; StorageError."""
    with _open(url) as arrays:
        return _shape(url, arrays)


def read_rows(url: str, block_rows: int) -> Iterator[SparseRows]:
    """Yield rows of the matrix at `url`, `block_rows` at a time (fewer at the end), with entries in file order.

    Values outside the range of a 32-bit float become infinite or NaN. Raises InputError, StorageError.
    """
    with _open(url) as arrays:
        rows, columns = _shape(url, arrays)
        indptr, indices, data = (arrays[name] for name in ("indptr", "indices", "data"))
        if indptr.length != rows + 1 or indices.length != data.length:
            raise _damaged(
                url,
                f"indptr, indices and data have {indptr.length:,}, {indices.length:,} and {data.length:,} entries, "
                f"which do not form a matrix of {rows:,} rows",
            )
        start = int(indptr.take(1)[0])
        if start != 0:
            raise _damaged(url, f"indptr starts with {start}, not 0")
        for first in range(0, rows, block_rows):
            ends = indptr.take(min(block_rows, rows - first)).astype(np.int64)
            offsets = np.concatenate([[start], ends])
            if (np.diff(offsets) < 0).any() or offsets[-1] > indices.length:
                raise _damaged(url, f"indptr decreases, or points past the end, from row {first} on")
            count = int(offsets[-1]) - start
            if count > _MOST_ENTRIES:
                raise _damaged(
                    url, f"the rows from {first} on have {count:,} entries; expected at most {_MOST_ENTRIES:,}"
                )
            named = indices.take(count).astype(np.int64)
            with np.errstate(over="ignore", invalid="ignore"):
                values = data.take(count).astype(np.float32)
            wrong = np.flatnonzero((named < 0) | (named >= columns))
            if len(wrong):
                row = first + int(np.searchsorted(offsets - start, wrong[0], "right")) - 1
                raise _damaged(url, f"row {row} has column {named[wrong[0]]}, but there are {columns:,} columns")
            yield SparseRows(named, values, offsets - start)
            start = int(offsets[-1])
        if start != indices.length:
            raise _damaged(url, f"indptr ends with {start:,}, but there are {indices.length:,} entries")
        for array in (indptr, indices, data):
            array.end()


@dataclass
class _Array:
    """One-dimensional array in a stream: `length` entries of `dtype`, read in order."""

    url: str
    name: str
    stream: IO[bytes]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.shape[0] if self.shape else 1

    def take(self, count: int) -> np.ndarray:
        parts = []
        missing = count * self.dtype.itemsize
        while missing:
            with _naming_damage(self.url):
                part = self.stream.read(min(missing, 1 << 24))
            if not part:
                raise _damaged(self.url, f"the array {self.name} is incomplete")
            parts.append(part)
            missing -= len(part)
        return np.frombuffer(b"".join(parts), self.dtype)

    def end(self) -> None:
        """Read to the end of the stream, so that its checksum is verified."""
        with _naming_damage(self.url):
            if self.stream.read(1):
                raise _damaged(self.url, f"the array {self.name} is too long")


@contextlib.contextmanager
def _open(url: str) -> Iterator[dict[str, _Array]]:
    with contextlib.ExitStack() as stack:
        arrays = {}
        for name in _MEMBERS:  # each array opens the file separately, so that the arrays read ahead independently
            file = stack.enter_context(lines.open_file(url))
            with _naming_damage(url):
                zipped = stack.enter_context(zipfile.ZipFile(file))
                if f"{name}.npy" not in zipped.namelist():
                    raise InputError(f"{url}: no array {name} in the file: not a CSR matrix of SciPy. {_REMEDY}")
                stream = stack.enter_context(zipped.open(f"{name}.npy"))
                arrays[name] = _Array(url, name, stream, *_header(url, name, stream))
        yield arrays


def _shape(url: str, arrays: dict[str, _Array]) -> tuple[int, int]:
    kind, shape = arrays["format"], arrays["shape"]
    if kind.dtype.kind not in "SU" or kind.length != 1 or kind.dtype.itemsize > _SMALL:
        raise InputError(f"{url}: the array format is not a string: not a CSR matrix of SciPy. {_REMEDY}")
    name = kind.take(1)[0]
    name = name.decode("ascii", "replace") if isinstance(name, bytes) else str(name)
    if name != "csr":
        raise InputError(f"{url}: a matrix in {name[:20]!r} order; expected 'csr'. {_REMEDY}")
    for array, kinds in (("shape", "iu"), ("indptr", "iu"), ("indices", "iu"), ("data", "biuf")):
        if arrays[array].dtype.kind not in kinds or len(arrays[array].shape) != 1:
            raise InputError(
                f"{url}: the array {array} has the type {arrays[array].dtype}, so this is not a CSR matrix. {_REMEDY}"
            )
    if shape.length != 2:
        raise InputError(f"{url}: the shape has {shape.length} numbers; expected rows and columns. {_REMEDY}")
    rows, columns = (int(size) for size in shape.take(2))
    if rows < 0 or columns < 0:
        raise InputError(f"{url}: unusable shape {rows} × {columns}. {_REMEDY}")
    return rows, columns


def read_header(stream: IO[bytes], most: int = 10_000) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Read (dtype, shape, whether in column-major order) from a `.npy` stream with a header of at most `most` bytes.

    Raises ValueError with a message that continues a sentence starting with the array's name.
    """
    magic = stream.read(8)
    width = {b"\x93NUMPY\x01": 2, b"\x93NUMPY\x02": 4, b"\x93NUMPY\x03": 4}.get(magic[:7], 0)
    size = int.from_bytes(stream.read(width), "little")
    if not width or size > most:
        raise ValueError("has no header")
    try:
        header = ast.literal_eval(stream.read(size).decode("utf-8"))
        dtype, shape, by_column = np.dtype(header["descr"]), header["shape"], header["fortran_order"]
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        raise ValueError("has a header that cannot be read") from None
    if not (isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)):
        raise ValueError(f"has the shape {shape!r:.60}")
    return dtype, shape, bool(by_column)


def _header(url: str, name: str, stream: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Read (dtype, shape) from the start of an array; reject an array that would have to be unpickled."""
    try:
        dtype, shape, by_column = read_header(stream, _SMALL)
    except ValueError as error:
        raise _damaged(url, f"the array {name} {error}") from None
    if dtype.kind not in "SUbiuf" or not dtype.itemsize or (by_column and len(shape) > 1):
        raise InputError(f"{url}: the array {name} does not contain plain numbers (pickled?). {_REMEDY}")
    return dtype, shape


@contextlib.contextmanager
def _naming_damage(url: str) -> Iterator[None]:
    try:
        yield
    except _BAD_ZIP as error:
        raise _damaged(url, str(error).rstrip(".") or "the file is incomplete") from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # a position before the start of the file
            raise _damaged(url, "the directory of the archive is damaged") from None
        raise StorageError(f"could not read {url}: {error}; run the same command again.") from error


def _damaged(url: str, fault: str) -> InputError:
    return InputError(
        f"{url}: not a NumPy .npz file, or damaged: {fault}. Copy the file again, or write a new file. {_REMEDY}"
    )
