"""Read lines of a plain or compressed file as record batches, in one streaming pass; reject damaged files."""

import bz2
import codecs
import contextlib
import functools
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import pyarrow as pa

from schemas import storage
from schemas.errors import InputError, StorageError

MAX_LINE_BYTES = 1 << 26  # a longer line is not a record, and would not fit into memory next to other lines
MAX_RATIO = 500  # largest ratio of content to compressed bytes, beyond _UNSUSPECTED bytes; no text compresses better
_UNSUSPECTED = 1 << 28
_CHUNK = 1 << 20
_ZSTD, _XZ = b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0"  # first bytes of a file
_THREADS = 16  # requests to storage at the same time


def _pieces(file: Any) -> Generator[bytes]:
    yield from iter(lambda: file.read(_CHUNK), b"")


def _streams(new: Callable[[], Any], padding: int, file: IO[bytes]) -> Generator[bytes]:
    """Yield the content of all streams of a bzip2 or xz file; between streams, `padding` zero bytes may repeat.

    The standard library's readers end at a damaged later stream without an error. Raises EOFError, OSError, LZMAError.
    """
    data = file.read(_CHUNK)
    while True:
        stream = new()
        while not stream.eof:
            if stream.needs_input and not data:
                raise EOFError
            yield stream.decompress(data, _CHUNK)
            data = file.read(_CHUNK) if stream.needs_input else b""
        data, zeros = stream.unused_data or file.read(_CHUNK), 0
        while padding and data.startswith(b"\0"):
            zeros += len(data) - len(data := data.lstrip(b"\0"))
            data = data or file.read(_CHUNK)
        if padding and zeros % padding:
            raise lzma.LZMAError(f"{zeros} zero bytes between streams")
        if not data:
            return


# By the end of the file name: the name of the format, and the function that yields the content of an open file.
_CODECS: dict[str, tuple[str, Callable[[Any], Generator[bytes]]]] = {
    ".gz": ("gzip", lambda file: _pieces(gzip.GzipFile(fileobj=file, mode="rb"))),
    ".bz2": ("bzip2", functools.partial(_streams, bz2.BZ2Decompressor, 0)),
    ".xz": ("xz", functools.partial(_streams, functools.partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), 4)),
    ".zst": ("zstd", lambda file: _pieces(pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd"))),
}
SUFFIXES = ("", *_CODECS)
CODEC = rf"(?:{'|'.join(map(re.escape, _CODECS))})?"  # pattern of a suffix
SCHEMA = pa.schema([pa.field("line", pa.large_binary(), nullable=False)])


class LineBlocks:
    """Lines of a file in batches: a binary column `line` [B] without line endings (LF or CRLF) or byte order mark.

    Batches have `block_lines` lines (the last may be shorter); the first `skip` lines are omitted. After reading,
    `ended` records whether the last line had a line ending, which is usually missing in incomplete files. Raises
    InputError if the format does not match the suffix, the file is incomplete or empty, or a line is longer than
    MAX_LINE_BYTES; StorageError.
    """

    def __init__(self, url: str, block_lines: int, skip: int = 0) -> None:
        self._url, self._block_lines, self._skip = url, block_lines, skip
        self.ended = True

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        skip, pending = self._skip, list[bytes]()
        for lines, ended in _split(self._url):
            self.ended = ended
            pending += lines[skip:] if skip else lines
            skip = max(skip - len(lines), 0)
            while len(pending) >= self._block_lines:
                yield _batch(pending[: self._block_lines])
                pending = pending[self._block_lines :]
        if pending:
            yield _batch(pending)


def read_lines(url: str) -> Generator[list[bytes]]:
    """Yield, for each MiB of the file's content, the lines that end in it. Raises the errors of `LineBlocks`."""
    yield from (lines for lines, _ in _split(url) if lines)


def first_line(url: str) -> bytes:
    """Read the first line of the file without reading the whole file. Raises the errors of `LineBlocks`."""
    with contextlib.closing(read_lines(url)) as some:
        return next(some, [b""])[0]


def identify(url: str) -> tuple[int, str]:
    """Return (bytes, SHA-256) of the stored file. Raises InputError, StorageError."""
    with open_file(url) as file:
        try:
            digest = storage.stream_sha256(file)
        except OSError as error:
            raise _lost(url, file.tell(), error) from error
        return file.tell(), digest


def unchecked(urls: Iterable[str]) -> list[str]:
    """List the zstd and xz files that carry no checksum (in the first frame), so that damage may change the content."""

    def carries_none(url: str) -> bool:
        with open_file(url) as file:
            head = file.read(8).ljust(8, b"\xff")
        return (head[:4] == _ZSTD and not head[4] & 4) or (head[:6] == _XZ and not head[7] & 15)

    with ThreadPoolExecutor(_THREADS) as pool:
        urls = [url for url in urls if url.endswith((".zst", ".xz"))]
        return [url for url, none in zip(urls, pool.map(carries_none, urls), strict=True) if none]


@contextlib.contextmanager
def unchanged(urls: Collection[str]) -> Iterator[None]:
    """Raise InputError after the block if one of the files has changed since its start. Raises StorageError."""
    before = _states(urls)
    yield
    changed = [url for url, state in _states(before).items() if state != before[url]]
    if changed:
        raise InputError(
            f"{changed[0]}: the file changed while it was read. Run the same command again when the file is complete."
        )


def _states(urls: Collection[str]) -> dict[str, tuple[str, ...]]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(urls, pool.map(storage.state, urls), strict=True))


def _batch(lines: list[bytes]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(lines, pa.large_binary())], schema=SCHEMA)


def open_file(url: str) -> IO[bytes]:
    """Open an input file without decompressing it. Raises InputError if there is no such file; StorageError."""
    try:
        return storage.open_read(url)
    except FileNotFoundError:
        raise InputError(f"{url}: file not found.") from None


def _split(url: str) -> Iterator[tuple[list[bytes], bool]]:
    """Yield, for each chunk, (the lines that end in the chunk, whether these lines have line endings)."""
    pending = b""
    empty = True
    for chunk in read_chunks(url):
        chunk = pending + chunk
        *whole, pending = chunk.split(b"\n")
        if max(map(len, [*whole, pending])) > MAX_LINE_BYTES:
            raise InputError(f"{url}: a line is longer than {MAX_LINE_BYTES:,} bytes. Check the line endings.")
        if empty and whole:
            empty, whole[0] = False, _without_mark(url, whole[0])
        yield [line.removesuffix(b"\r") for line in whole] if b"\r" in chunk else whole, True
    if empty:
        pending = _without_mark(url, pending)
    if pending:
        yield [pending.removesuffix(b"\r")], False
    elif empty:
        raise InputError(f"{url}: the file is empty. Copy the file again, or remove the file.")


def _without_mark(url: str, line: bytes) -> bytes:
    """Return the first line of a file without the UTF-8 byte order mark."""
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{url}: text in UTF-16. Expected UTF-8: convert the file with `iconv -f UTF-16 -t UTF-8`.")
    return line.removeprefix(codecs.BOM_UTF8)


def read_chunks(url: str) -> Iterator[bytes]:
    """Yield chunks of the content, decompressed according to the extension. Raises the errors of `LineBlocks`."""
    suffix = next((suffix for suffix in _CODECS if url.endswith(suffix)), None)
    name, unpack = _CODECS[suffix] if suffix else ("plain", _pieces)
    with open_file(url) as file, contextlib.closing(unpack(file)) as content:
        unpacked = 0
        try:
            for chunk in content:
                unpacked += len(chunk)
                if suffix and unpacked > max(_UNSUSPECTED, MAX_RATIO * file.tell()):
                    raise InputError(
                        f"{url}: {file.tell():,} bytes unpack to more than {unpacked:,}, which is unusual for text. "
                        f"Expected at most {MAX_RATIO} times the compressed size. If the size is correct, unpack the "
                        "file first."
                    )
                yield chunk
        except EOFError:
            raise _cut_off(url, name, file.tell()) from None
        except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            raise _damaged(url, name, error) from None
        except OSError as error:
            # bzip2 and zstd do not define their own errors.
            if name == "zstd" and "Truncated compressed stream" in str(error):
                raise _cut_off(url, name, file.tell()) from None
            if name == "zstd" and "too much memory" in str(error):
                raise InputError(
                    f"{url}: zstd with a window of more than 128 MiB; expected at most 128 MiB. Write the file with a "
                    "smaller window: zstd -dc -M2048MB FILE | zstd > NEW.zst."
                ) from None
            if (name, "data stream") == ("bzip2", str(error)[-11:]) or (name == "zstd" and "ZSTD" in str(error)):
                raise _damaged(url, name, error) from None
            raise _lost(url, file.tell(), error) from error


def _lost(url: str, after: int, error: OSError) -> StorageError:
    return StorageError(f"could not read {url} after {after:,} bytes: {error}; run the same command again.")


def _cut_off(url: str, name: str, after: int) -> InputError:
    return InputError(f"{url}: incomplete: the {name} stream stops after {after:,} bytes. Copy the file again.")


def _damaged(url: str, name: str, error: Exception) -> InputError:
    return InputError(
        f"{url}: not a {name} file, or damaged ({error}). The file name indicates {name}: compress a plain file with "
        f"`{name}`, and copy a damaged file again."
    )
