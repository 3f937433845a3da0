"""Bytes of a shard: where they are read from, ranges of them, the interface of an open shard, and the local cache."""

import contextlib
import fcntl
import os
import re
import shutil
import struct
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa
from fsspec.spec import AbstractBufferedFile

from schemas import storage
from schemas.errors import InputError, StorageError, TableError
from schemas.manifest import Shard, find_shard, shard_url
from schemas.mapped import MappedFile
from schemas.storage import TEMPORARY, crc32, replacing
from schemas.waits import Wait

MARKER = ".extremis-cache"
_COUNT = ".bytes"
_ENTRY = re.compile(r"([0-9a-f]{64})-(\d+)-(\d+)")
# A temporary file has the end of an entry's name.
_LEFT_OVER = re.compile(rf"{re.escape(TEMPORARY)}[0-9a-f]{{32}}(-[0-9a-f]+-\d+-\d+)?")
_CHECKSUM = struct.Struct("<I")
GAP = 1 << 17  # largest gap between two ranges for which one request is cheaper than two
_TAIL = 1 << 16  # bytes of the first read: most footers and indexes fit
_KEPT = 0.9  # share of the limit that a clean-up keeps, because scanning all entries is slow

Range = tuple[int, int]


@dataclass(frozen=True)
class Access:
    """Options for reading shards: verification of checksums, a cache of remote ranges, an event that ends retries."""

    verify: bool = True
    cache: "LocalCache | None" = None
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


class OpenShard(AbstractContextManager["OpenShard"]):
    """An open shard; any number of threads may read its row groups.

    Damaged bytes raise ValueError or an error of Arrow.
    """

    schema_arrow: pa.Schema
    num_row_groups: int
    memory: int  # approximate bytes of memory while the shard is open

    def __init__(self, source: Source) -> None:
        self._source, self.local = source, isinstance(source, MappedFile)

    def ranges(self, group: int, columns: Sequence[str] | None = None) -> list[Range]:
        """Return the byte ranges that `read_row_group` reads; none by default: opening the shard reads all bytes."""
        return []

    def fetch(self, group: int, columns: Sequence[str] | None = None) -> FetchedRanges:
        """Fetch the bytes of `columns` of row group `group`; nearby ranges share a request."""
        ranges = merged(self.ranges(group, columns))
        return FetchedRanges([(start, self._source.read(start, stop)) for start, stop in ranges])

    @abstractmethod
    def read_row_group(
        self, group: int, columns: Sequence[str] | None = None, pieces: FetchedRanges | None = None
    ) -> pa.Table:
        """Read the existing `columns` of row group `group`, from `pieces` if they were fetched before."""

    def close(self) -> None:
        """Close open files; by default there are none."""

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class LocalCache:
    """Cache of at most `limit` bytes in `folder`, shared by threads and processes."""

    folder: str
    limit: int

    def __post_init__(self) -> None:
        """Set up `folder`. Raises InputError if the folder contains other files, or has no space for `limit` bytes."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            names = os.listdir(self.folder)
            if names and MARKER not in names:
                raise InputError(
                    f"storage.cache = {self.folder!r}: the directory contains other files ({sorted(names)[0]!r}, …), "
                    "and a cache removes files. Name an empty or a new directory."
                )
            with contextlib.suppress(FileExistsError), open(self._path(MARKER), "x") as marker:
                marker.write(
                    "Extremis caches remote shards here. The folder can be removed when no process reads it.\n"
                )
            with self._locked():
                held = self._scan(self.limit)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise InputError(
                f"storage.cache = {self.folder!r}: {error.strerror or error}. Name a writable directory on a local "
                "disk."
            ) from error
        if self.limit > free + held:
            raise InputError(
                f"storage.cache_size: {self.limit:,} bytes do not fit on the disk of {self.folder}: {free:,} are free "
                f"and {held:,} are cached. Lower storage.cache_size, or name a directory on another disk."
            )

    def require(self, least: int, why: str) -> None:
        """Raise InputError if the limit is below the `least` bytes that `why` needs at once."""
        if self.limit < least:
            raise InputError(
                f"storage.cache_size: {self.limit:,} bytes are too few: {why} take {least:,} at once. Raise "
                "storage.cache_size, or set storage.cache = '' to read without a cache."
            )

    def get(self, sha256: str, start: int, stop: int) -> bytes | None:
        """Return bytes [start, stop) of file `sha256`, or None. An entry that does not match its CRC-32 is removed."""
        path, size = self._entry(sha256, start, stop), stop - start
        with contextlib.suppress(OSError):
            with open(path, "rb") as file:
                content = file.read()
            data = content[:size]
            if content[size:] == _CHECKSUM.pack(crc32(data)):
                os.utime(path)
                return data
            os.unlink(path)
        return None

    def put(self, sha256: str, start: int, stop: int, data: bytes) -> None:
        """Store bytes [start, stop) of file `sha256`, and remove the least recently used entries if space is short."""
        size = len(data) + _CHECKSUM.size
        if size > self.limit:
            return
        path = self._entry(sha256, start, stop)
        with contextlib.suppress(OSError), self._locked():
            if os.path.exists(path):  # another process or thread fetched it at the same time
                return
            self._make_room(size)
            with replacing(path, durable=False) as temporary, open(temporary, "xb") as out:
                out.write(data)
                out.write(_CHECKSUM.pack(crc32(data)))

    def discard(self, sha256: str) -> None:
        """Remove all entries of file `sha256`."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._path(sha256[:2])):
                if entry.name.startswith(f"{sha256}-") and _ENTRY.fullmatch(entry.name):
                    os.unlink(entry.path)

    def _make_room(self, size: int) -> None:
        held = self.limit
        with contextlib.suppress(OSError, ValueError), open(self._path(_COUNT), "rb") as file:
            held = int(file.read())
        if held + size > self.limit:
            held = self._scan(min(int(self.limit * _KEPT), self.limit - size))
        self._count(held + size)

    def _scan(self, most: int) -> int:
        """Remove files of killed processes, and least recently used entries above `most` bytes; return the new size.

        The caller holds the lock.
        """
        entries = []
        for folder in os.scandir(self.folder):
            if not re.fullmatch(r"[0-9a-f]{2}", folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                with contextlib.suppress(FileNotFoundError):
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    if _LEFT_OVER.fullmatch(entry.name):
                        os.unlink(entry.path)
                    elif _ENTRY.fullmatch(entry.name):
                        stat = entry.stat(follow_symlinks=False)
                        entries.append((stat.st_mtime_ns, stat.st_size, entry.path))
        held = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if held <= most:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            held -= size
        self._count(held)
        return held

    def _count(self, held: int) -> None:
        """Overwrite the count in place, because truncating the file first takes a millisecond on many disks."""
        with open(os.open(self._path(_COUNT), os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
            file.write(b"%020d" % held)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self._path(MARKER)) as marker:
            with Wait(f"another process that uses the cache {self.folder}"):
                fcntl.flock(marker, fcntl.LOCK_EX)
            yield

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _entry(self, sha256: str, start: int, stop: int) -> str:
        return os.path.join(self.folder, sha256[:2], f"{sha256}-{start}-{stop}")
