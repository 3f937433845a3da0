"""Files mapped into memory: scratch files and input files.

If the disk is full or the file was truncated, the system kills a process that touches a mapped page (SIGBUS), and the
process cannot print a message. Therefore the space for a scratch file is reserved at the start, and an input file is
checked for changes before it is used.
"""

import contextlib
import errno
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from schemas.errors import RoomError, failure_of
from schemas.ragged import Ragged
from schemas.sizes import say_bytes

_HEADER = 1 << 26  # limit in bytes for the names and shapes of tensors
_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
}


def file_stamp(file: str | int) -> tuple[int, int, int]:
    """Return (inode, bytes, nanoseconds of the last change) of a path or an open file; zeros if there is no file."""
    try:
        facts = os.stat(file)
    except FileNotFoundError:
        return 0, 0, 0
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


class MappedFile:
    """The first `length` bytes of a local file (0: all), which stay readable if the file is replaced or removed.

    `private`: changes to the bytes stay in memory and do not reach the file. Raises FileNotFoundError, and ValueError
    if the file is shorter.
    """

    def __init__(self, path: str, length: int = 0, private: bool = False) -> None:
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
        with open(path, "rb") as file:
            self.path, self._stamp = path, file_stamp(file.fileno())
            self._map = mmap.mmap(file.fileno(), length, access=access)
        self._length = len(self._map)
        self.buffer = pa.py_buffer(self._map)

    def read(self, start: int, stop: int) -> pa.Buffer:
        """Return a view of the bytes.

        Raises ValueError if the file was truncated, because reading the bytes would kill the process.
        """
        size = self._map.size()
        if size < self._length:
            raise ValueError(f"{size} bytes, expected {self._length}")
        return self.buffer.slice(start, stop - start)

    def has_changed(self) -> bool:
        """Return whether the file has changed since it was mapped."""
        now = file_stamp(self.path)
        return now[0] == self._stamp[0] and now != self._stamp


MapFile = Callable[[str], MappedFile]  # maps a file, given its name in a folder


def map_tensors(file: MappedFile) -> dict[str, np.ndarray]:
    """Return the tensors (float32, float16, int64) of a mapped safetensors file, without a copy.

    Raises ValueError if the file has a different format.
    """
    data = np.frombuffer(file.buffer, np.uint8)
    start = 8 + int(data[:8].view("<u8")[0]) if len(data) >= 8 else 0
    if not 8 < start <= min(len(data), _HEADER):
        raise ValueError(f"no header of tensors in {len(data)} bytes")
    tensors = {}
    for name, facts in json.loads(data[8:start].tobytes()).items():
        if name == "__metadata__":
            continue
        (first, stop), dtype = facts["data_offsets"], _DTYPES[facts["dtype"]]
        if not 0 <= first <= stop <= len(data) - start:
            raise ValueError(f"tensor {name} at {first} to {stop} of {len(data) - start} bytes")
        tensors[name] = data[start + first : start + stop].view(dtype).reshape(facts["shape"])
    return tensors


class ScratchFile:
    """Unnamed file for `what` in TMPDIR, or in `directory`; the file disappears with its map, however the process ends.

    Raises StorageError if there is no room.
    """

    def __init__(self, what: str, directory: str = "") -> None:
        self._what, self._directory, self._size = what, directory or tempfile.gettempdir(), 0
        self._remedy = "Choose another directory" if directory else "Set TMPDIR to a folder with more room"
        with self._room_for(0):
            self._file = tempfile.TemporaryFile(prefix="extremis-", dir=self._directory)  # noqa: SIM115

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        with self._room_for(data.nbytes):
            self._file.write(data)

    def write_at(self, place: int, data: memoryview) -> None:
        """Write bytes at byte offset `place`; gaps take no space on disk."""
        with self._room_for(data.nbytes):
            while data:
                written = os.pwrite(self._file.fileno(), data, place)
                place, data = place + written, data[written:]

    def read_at(self, place: int, into: memoryview) -> None:
        """Fill `into` from byte offset `place`; another thread may write at other offsets at the same time."""
        while into:
            read = os.preadv(self._file.fileno(), [into], place)
            place, into = place + read, into[read:]

    def reserve(self, size: int) -> mmap.mmap:
        """Map `size` zero bytes, and reserve their space on disk now; on tmpfs, such as /dev/shm, in memory."""
        with self._room_for(size), self._file:
            if size > shutil.disk_usage(self._directory).free:  # else the disk would fill up before the error
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._file.fileno(), 0, size)
            return mmap.mmap(self._file.fileno(), size)

    def map(self) -> mmap.mmap | bytes:
        """Map the written bytes for reading."""
        with self._room_for(0), self._file:
            self._file.flush()
            # An empty file cannot be mapped.
            return mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) if self._size else b""

    @contextlib.contextmanager
    def _room_for(self, size: int) -> Iterator[None]:
        self._size += size
        try:
            yield
        except OSError as error:
            kind, reason = failure_of(error), f"cannot create a file for {self._what} ({error.strerror})"
            if kind is RoomError:
                free = shutil.disk_usage(self._directory).free
                reason = f"{self._what} need {say_bytes(self._size)}, and {say_bytes(free)} are free"
            raise kind(f"{self._directory}: {reason}. {self._remedy}.") from error


class ScratchRows:
    """Rows of entries, stored end to end in scratch files for `what`. Raises StorageError if there is no room."""

    def __init__(self, what: str) -> None:
        self._values, self._offsets = ScratchFile(what), ScratchFile(what)
        self._count, self._dtype = 0, np.dtype(np.uint16)

    def add(self, rows: Ragged) -> None:
        """Append rows; all entries have the same type."""
        self._dtype = rows.values.dtype
        self._values.write(np.ascontiguousarray(rows.entries).data)
        self._offsets.write((rows.offsets[:-1] - rows.offsets[0] + self._count).data)
        self._count += len(rows.entries)

    def mapped(self) -> Ragged:
        """Return all rows, mapped for reading."""
        self._offsets.write(np.array([self._count], np.int64).data)
        return Ragged(np.frombuffer(self._values.map(), self._dtype), np.frombuffer(self._offsets.map(), np.int64))
