"""Lines of a gzip file as record batches, in one streaming pass; what is no whole gzip of lines is refused here."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import pyarrow as pa

from schemas import storage
from schemas.errors import InputError, StorageError

MAX_LINE_BYTES = 1 << 26  # a longer line is no record, and would not fit beside its neighbours in memory
_CHUNK = 1 << 20
SCHEMA = pa.schema([pa.field("line", pa.large_binary(), nullable=False)])


@dataclass(frozen=True)
class Survey:
    """What one pass over a file shows: its identity (compressed bytes, SHA-256) and its number of lines."""

    bytes: int
    sha256: str
    lines: int


def read_blocks(url: str, block_lines: int) -> Iterator[pa.RecordBatch]:
    """Batches of `block_lines` raw lines (the last may be shorter), without line ends; column `line` [B] binary.

    Raises InputError (not gzip, cut off, no lines, a line beyond MAX_LINE_BYTES), StorageError.
    """
    with _open(url) as file:
        pending: list[bytes] = []
        for lines in _split(url, _Hashed(file)):
            pending += lines
            while len(pending) >= block_lines:
                yield _batch(pending[:block_lines])
                pending = pending[block_lines:]
        if pending:
            yield _batch(pending)


def survey(url: str) -> Survey:
    """Read the whole file once, so that whatever is wrong with it shows before any work. Raises as `read_blocks`."""
    with _open(url) as file:
        hashed = _Hashed(file)
        lines = sum(len(some) for some in _split(url, hashed))
    return Survey(hashed.bytes, hashed.sha256.hexdigest(), lines)


def _batch(lines: list[bytes]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(lines, pa.large_binary())], schema=SCHEMA)


def _open(url: str) -> IO[bytes]:
    try:
        return storage.open_read(url)
    except FileNotFoundError:
        raise InputError(f"{url}: no such file.") from None


def _split(url: str, file: "_Hashed") -> Iterator[list[bytes]]:
    """Whole lines, as many as each chunk completes."""
    pending = b""
    empty = True
    for chunk in _decompress(url, file):
        empty = False
        *whole, pending = (pending + chunk).split(b"\n")
        if max(map(len, [*whole, pending])) > MAX_LINE_BYTES:
            raise InputError(
                f"{url}: a line is longer than {MAX_LINE_BYTES:,} bytes. "
                "Expected one JSON object a line: are the line ends there?"
            )
        yield whole
    if empty:
        raise InputError(f"{url}: empty: it holds no line. Expected one JSON object a line.")
    if pending:
        yield [pending]


def _decompress(url: str, file: "_Hashed") -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=file, mode="rb") as unzipped:  # type: ignore[call-overload]
            while chunk := unzipped.read(_CHUNK):
                yield chunk
    except EOFError:
        raise InputError(
            f"{url}: cut off: the gzip stream stops after {file.bytes:,} bytes without its end. Copy it again."
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{url}: not a gzip file, or a damaged one ({error}). Expected gzip of one JSON object a line; compress a "
            "plain file with `gzip`, copy a damaged one again."
        ) from None
    except OSError as error:
        raise StorageError(
            f"could not read {url} after {file.bytes:,} bytes: {error}; run the same command again."
        ) from error


class _Hashed:
    """A file that counts and hashes what is read from it; gzip's readers need no more than `read`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        self.bytes += len(data)
        return data
