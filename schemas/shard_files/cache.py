"""Cache of remote shards on a local disk: byte ranges, named by the SHA-256 of their file, in a separate directory.

    FOLDER/.extremis-cache            marks the directory as a cache; locked for writing
    FOLDER/.bytes                     at least the bytes of all entries: bytes are counted before they are written
    FOLDER/ab/ab12...-START-STOP      the bytes, and their CRC-32

Processes of one machine may share the cache, and may be killed at any moment: an entry appears as a whole (a temporary
file is renamed) and is checked when it is read. The least recently used entries are removed first, and no other file is
ever removed. If the cache fails, for example because the disk is full, reading only takes longer.
"""

import contextlib
import fcntl
import os
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from schemas.checksums import crc32
from schemas.errors import InputError
from schemas.storage import TEMPORARY, replacing
from schemas.waits import Wait

MARKER = ".extremis-cache"
_COUNT = ".bytes"
_ENTRY = re.compile(r"([0-9a-f]{64})-(\d+)-(\d+)")
_LEFT_OVER = re.compile(rf"{re.escape(TEMPORARY)}[0-9a-f]{{32}}(-{_ENTRY.pattern})?")
_CHECKSUM = struct.Struct("<I")
_KEPT = 0.9  # share of the limit that a clean-up keeps, because scanning all entries is slow


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
