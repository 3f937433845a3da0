"""Half-open byte ranges of a shard, mapped from a local disk or fetched from remote storage."""

import contextlib
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from fsspec.spec import AbstractBufferedFile

from schemas import storage
from schemas.errors import StorageError, TableError
from schemas.manifest import Shard, find_shard, shard_url
from schemas.mapped import MappedFile
from schemas.shard_files.cache import LocalCache

GAP = 1 << 17  # largest gap between two ranges for which one request is cheaper than two
_TAIL = 1 << 16  # bytes of the first read: most footers and indexes fit

Range = tuple[int, int]


@dataclass(frozen=True)
class Access:
    """Options for reading shards: verification of checksums, a cache of remote ranges, an event that ends retries."""

    verify: bool = True
    cache: LocalCache | None = None
    cancelled: threading.Event | None = None


VERIFIED = Access()


class RemoteFile:
    """File on remote storage. Each read is one request, with retries, unless the bytes are in the cache.

    Reads raise FileNotFoundError, StorageError.
    """

    def __init__(self, url: str, sha256: str, access: Access) -> None:
        self._url, self._sha256, self._access = url, sha256, access

    def read(self, start: int, stop: int) -> pa.Buffer:
        """Read bytes [start, stop)."""
        cache = self._access.cache
        data = cache.get(self._sha256, start, stop) if cache else None
        if data is None:
            data = storage.read_range(self._url, start, stop, self._access.cancelled)
            if cache:
                cache.put(self._sha256, start, stop, data)
        return pa.py_buffer(data)


Source = MappedFile | RemoteFile


@contextlib.contextmanager
def opening(url: str, shard: Shard, access: Access) -> Iterator[Source]:
    """Yield the source from which to read `shard` of the table at `url`; the block reads the end of the file.

    Raises TableError if the shard is missing or damaged, or its length has changed; StorageError.
    """
    place = shard_url(url, shard)
    if storage.is_local(place):
        find_shard(url, shard)
        with naming_damage(place):
            yield MappedFile(storage.filesystem(place)[1], shard.bytes)
        return
    try:
        with naming_damage(place):
            yield RemoteFile(place, shard.sha256, access)
    except (FileNotFoundError, StorageError, TableError):
        if access.cache:
            access.cache.discard(shard.sha256)
        find_shard(url, shard)  # costs a request, so it only runs to find the reason
        raise


def read_end(source: Source, length: int, footer: struct.Struct, magic: bytes) -> tuple[pa.Buffer, tuple[int, ...]]:
    """Read the index of a file of `length` bytes, found by the `footer` at its end; return (index, footer fields).

    The last two footer fields are the length of the index and `magic`. Raises ValueError if the magic differs.
    """
    begin = max(0, length - _TAIL)
    tail = source.read(begin, length)
    if tail.size < footer.size:
        raise ValueError(f"{length} bytes are too few for a shard")
    *facts, size, actual = footer.unpack(tail[-footer.size :])
    start = length - footer.size - size
    if actual != magic or start < 0:
        raise ValueError("no shard index at the end of the file")
    return tail[start - begin :] if start >= begin else source.read(start, length), (*facts, size)


@contextlib.contextmanager
def naming_damage(place: str) -> Iterator[None]:
    """Turn any decoding error of Arrow into a one-line TableError that names `place`."""
    try:
        yield
    except FileNotFoundError:
        raise TableError(
            f"{place}: the manifest names this shard, but the file is missing. Make the table again."
        ) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise TableError(f"{place}: damaged: {reason}. Make the table again.") from error


class FetchedRanges:
    """Fetched ranges of one file, in order."""

    def __init__(self, pieces: Sequence[tuple[int, pa.Buffer]]) -> None:
        self._pieces = pieces

    @classmethod
    def fetch(cls, source: Source, ranges: Iterable[Range]) -> "FetchedRanges":
        """Read `ranges`; nearby ranges share a request."""
        return cls([(start, source.read(start, stop)) for start, stop in merged(ranges)])

    def read(self, start: int, stop: int) -> pa.Buffer:
        """Return a view of fetched bytes. Raises ValueError for bytes that were not fetched."""
        for first, data in self._pieces:
            if first <= start and stop <= first + data.size:
                return data if (start, stop) == (first, first + data.size) else data.slice(start - first, stop - start)
        raise ValueError(f"the footer does not name the bytes [{start}, {stop})")


class FetchedRangesFile(AbstractBufferedFile):
    """File of `length` bytes, of which only the `pieces` can be read; `pieces` may be replaced."""

    def __init__(self, length: int) -> None:
        super().__init__(None, "", size=length, cache_type="none")
        self.pieces = FetchedRanges(())

    def read_buffer(self, size: int) -> pa.Buffer:
        """Read without a copy; Arrow calls this."""
        data = self.pieces.read(self.loc, self.loc + size)
        self.loc += size
        return data

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.pieces.read(start, end).to_pybytes()


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges, and join neighbours that are at most GAP bytes apart."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] <= GAP:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined
