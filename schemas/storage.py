"""Files at any fsspec URL: read and written with retries, each file whole or not at all; checksums; room on a disk.

A URL is a local path, or what fsspec accepts: `file://`, `memory://`, `s3://`, `gs://`, ... It names exactly one place:
no function takes `*`, `?`, `[` or `]` for a pattern. Places come first, then reading, listing, writing and removing;
then content with checksums and JSON; then the room on a disk; last, what the functions share.
"""

import base64
import contextlib
import errno
import functools
import hashlib
import io
import json
import math
import os
import posixpath
import random
import re
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import IO, Any, NamedTuple, NoReturn, TypeVar

import fsspec
import numpy as np
from fsspec.core import url_to_fs
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from schemas.errors import (
    AccessError,
    ExtremisError,
    InputError,
    PlanError,
    RoomError,
    StorageError,
    TableError,
    failure_of,
    has_credentials,
    missing_extra,
    redact_known,
)
from schemas.outages import EXPIRED, NO_NAME, answer_of, is_outage, may_pass, patience
from schemas.process import survive_forks
from schemas.sizes import say_bytes
from schemas.waits import Wait

try:
    from zlib_ng.zlib_ng import crc32 as crc32  # ten times as fast as zlib's CRC-32
except ImportError:  # for machines where the package cannot be installed
    from zlib import crc32 as crc32

ATTEMPTS = 5
DEADLINE_SECONDS = 300.0  # no further attempt starts after this time, unless patience is longer
CLEAN_UP_SECONDS = 3.0  # limit for a request while a thread cleans up
REQUEST_SECONDS = 60.0  # limit for one look-up or one range, for servers that accept a connection and never answer
FILE_SECONDS = 900.0  # limit for reading a whole file at once, or for removing a prefix
CONNECTIONS = 64  # connections to an object store
MOVE_THREADS = 16  # copies within a store, or removals, that run at the same time
_BULK = 1000  # most objects that one request removes
READ_BYTES = 4 << 20  # size of one request of a streaming pass
SLOWEST_SECONDS = 8.0  # longest pause between two attempts
READ_ATTEMPTS = 3  # number of times that bytes with a wrong checksum are read
MAX_BYTES = 1 << 28  # size of the largest JSON object that is parsed
_FIELD = "crc32"  # checksum of the other fields of a JSON object
_CHECKSUM = np.dtype("<u4")
_MORE_SILENT_SECONDS = 15.0  # because a large file takes longer than other waits
_LONGEST = 4096  # longest path that operating systems allow, in characters
TEMPORARY = ".tmp-"
_END = 50  # characters of a name, such as its extension, that a temporary file keeps: a name may have 255 bytes
# What stores say about a file that changes with its content.
_STATE = ("size", "ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "updated", "created")
_OPEN_FILE = re.compile(r"/proc/(?P<process>self|\d+)(?:/task/\d+)?/fd/(?P<number>\d+)|/dev/fd/(?P<opened>\d+)")
_MAX_LINKS = 40  # largest number of symbolic links to follow, as in operating systems
_CREDENTIALS = (
    "environment variables (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS), or the "
    "store's credentials file"
)
# Drivers cut a URL here, and read another version of the object.
_VERSION = re.compile(r"(?i)\?(?:.*&)?(?:versionId|generation)=|^gc?s://.*#\d+$")
_WRITES = "write", "copy to", "remove"
_JITTER = random.SystemRandom()
_clock = time.monotonic


T = TypeVar("T")


class _ThreadState(threading.local):
    # Whether this thread cleans up after a failure of storage: its requests are tried once. Others may still write.
    cleaning_up = False
    patient = True  # whether this thread's requests are tried for as long as `patience` says


thread_state = _ThreadState()
before_late_write: list[Callable[[str], None]] = []  # called with the URL before a write is tried again; may raise
retries = 0  # requests of this process that were tried again
survive_forks()


def join(url: str, *parts: str) -> str:
    """Append `parts` to `url`, separated by single slashes."""
    scheme, separator, path = url.rpartition("://")
    head = [path.rstrip("/")] if path else []
    return scheme + separator + "/".join([*head, *(part.strip("/") for part in parts)])


def resolve(url: str, place: str) -> str:
    """Return the URL of `place`, a path relative to the prefix `url`, or an absolute URL.

    Raises InputError if `place` points outside of the bucket.
    """
    if "://" in place or place.startswith("/"):
        return place
    scheme, separator, path = url.rpartition("://")
    resolved = posixpath.normpath(posixpath.join(path, place))
    if separator and (resolved == "." or resolved.startswith("..")):
        raise InputError(f"{url}: the path {place!r} points outside of {scheme}://. Make the table again.")
    return scheme + separator + resolved


def relative(url: str, target: str) -> str:
    """Return `target` relative to the prefix `url` if both URLs are in one store and bucket, else the absolute URL."""
    scheme, separator, path = url.rpartition("://")
    other, other_separator, there = target.rpartition("://")
    if not other_separator:
        there = os.path.abspath(there)
    if (scheme, separator) != (other, other_separator):
        return other + other_separator + there
    if not separator:
        return posixpath.relpath(there, os.path.abspath(path))
    if path.partition("/")[0] != there.partition("/")[0]:
        return target
    return posixpath.relpath("/" + there, "/" + path)


def filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the fsspec filesystem of `url` and the path inside it. A path without `://` is local, whatever its name.

    Raises InputError for an unknown scheme, a malformed URL, credentials in a bucket's URL, a chain of URLs (`::`) or
    the version of an object; StorageError if a server cannot be reached.
    """
    if has_credentials(url):
        raise InputError(f"cannot open {url!r}: the URL contains credentials. Set {_CREDENTIALS} instead.")
    if not url.strip():
        raise InputError(f"an empty path ({url!r}): name a directory or a URL.")
    if len(url) > _LONGEST:
        raise InputError(f"the path has {len(url):,} characters; expected at most {_LONGEST:,}. Fix the path.")
    if "\0" in url:
        raise InputError(f"cannot open {url!r}: the path contains a NUL character. Fix the path.")
    scheme, is_url, _ = url.partition("://")
    if not is_url or scheme in ("file", "local"):  # fsspec would take a::b for a chain, and data:x for a scheme
        disk = fsspec.filesystem("file")
        return disk, disk._strip_protocol(url if is_url or url[0] in "/~." else f"./{url}")
    if "::" in url:
        raise InputError(f"cannot open {url!r}: `::` would chain two URLs. Give one URL without `::`.")
    if scheme not in ("http", "https") and _VERSION.search(url):
        raise InputError(
            f"cannot open {url!r}: the end of the URL names a version of an object, but a place is its newest version. "
            "Leave the version out."
        )
    options = {}
    if scheme in ("s3", "s3a"):  # botocore has a limit of 10 connections; the user's configuration has priority
        configured = fsspec.config.conf.get(scheme, {}).get("config_kwargs", {})
        options = {"config_kwargs": {"max_pool_connections": CONNECTIONS, **configured}}
    try:
        fs, path = url_to_fs(url, **options)
    except OSError as error:
        cause = redact_known(str(error), url)
        raise failure_of(error)(f"cannot reach {url}: {cause}; check the host, or try again later.") from None
    except ImportError as error:
        extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(scheme)
        if extra is None:
            raise InputError(f"cannot open {url!r}: {error}. Install the package for this scheme.") from error
        raise missing_extra(f"cannot open {url!r}: {error}", extra) from error
    except Exception as error:  # fsspec's filesystems may raise any kind of error for a URL
        cause = redact_known(str(error) or type(error).__name__, url)
        raise InputError(f"cannot open {url!r}: {cause}. Check the spelling.") from None
    return fs, path


def is_local(url: str) -> bool:
    """Return true if `url` is on a local disk."""
    return isinstance(filesystem(url)[0], LocalFileSystem)


def is_stream(url: str) -> bool:
    """Return true if `url` is a local file but not a regular file: a device, a pipe, or an open file descriptor."""
    fs, path = filesystem(url)
    if not isinstance(fs, LocalFileSystem):
        return False
    if _descriptor(path) is not None:
        return True
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    return False


def is_folder(url: str) -> bool:
    """Return true if `url` is a folder of a local disk."""
    fs, path = filesystem(url)
    return isinstance(fs, LocalFileSystem) and os.path.isdir(path)


def is_within(url: str, prefix: str) -> bool:
    """Return true if `url` is `prefix` or is below `prefix`; on a local disk, links are followed first."""
    (fs, path), (other, root) = filesystem(url), filesystem(prefix)
    if type(fs) is not type(other):
        return False
    if isinstance(fs, LocalFileSystem):
        with contextlib.suppress(OSError):
            if os.path.samefile(path, root):
                return True
        path, root = os.path.realpath(path), os.path.realpath(root)
    return f"{path.rstrip('/')}/".startswith(f"{root.rstrip('/')}/")


def exists(url: str) -> bool:
    """Return true if a file is at `url`. Raises StorageError if storage does not answer."""
    fs, path = filesystem(url)

    def find() -> bool:
        try:  # fsspec's isfile() is False after any failure
            return bool(_call_with_timeout(fs, "info", path)["type"] == "file")
        except (FileNotFoundError, NotADirectoryError):
            return False

    return _retry(find, "look for", url)


def size(url: str) -> int:
    """Return the size in bytes of the file at `url`. Raises FileNotFoundError, StorageError."""
    fs, path = filesystem(url)
    return _retry(lambda: int(_call_with_timeout(fs, "info", path)["size"]), "look up", url)


def state(url: str) -> tuple[str, ...]:
    """Return the size, and the time of change or the ETag, of a file, which differ after a change; () for no file."""
    fs, path = filesystem(url)
    names = ("size", "mtime", "ino") if isinstance(fs, LocalFileSystem) else _STATE
    try:
        info = _retry(lambda: _call_with_timeout(fs, "info", path), "look up", url)
    except FileNotFoundError:
        return ()
    return tuple(f"{name}={info[name]}" for name in names if name in info)


def read_bytes(url: str) -> bytes:
    """Read the whole file at `url`. Raises FileNotFoundError, StorageError."""
    fs, path = filesystem(url)
    return _retry(lambda: _call_with_timeout(fs, "cat_file", path, seconds=FILE_SECONDS), "read", url)


def read_range(
    url: str, start: int, stop: int, cancelled: threading.Event | None = None, checksum: int | None = None
) -> bytes:
    """Read bytes [start, stop) of the file at `url`; no further attempt starts once `cancelled` is set.

    Bytes that do not match `checksum`, a CRC-32, are read again. Raises FileNotFoundError, StorageError.
    """
    fs, path = filesystem(url)

    def read() -> bytes:
        data: bytes = _call_with_timeout(fs, "cat_file", path, start=start, end=stop)
        if len(data) != stop - start:
            raise OSError(errno.EBADMSG, f"got {len(data)} bytes, expected {stop - start}")
        if checksum is not None and crc32(data) != checksum:
            raise OSError(errno.EBADMSG, f"bytes {start} to {stop} are damaged: the checksum differs")
        return data

    return _retry(read, "read", url, cancelled)


def open_read(url: str) -> IO[bytes]:
    """Open the file at `url` for one streaming pass; on remote storage in requests of READ_BYTES, each with retries.

    Raises FileNotFoundError, StorageError. Reads raise OSError on a local disk, StorageError elsewhere.
    """
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return _retry(lambda: fs.open(path, "rb"), "open", url)
    return io.BufferedReader(RangeReader(url, size(url)), READ_BYTES)


class RangeReader(AbstractBufferedFile):
    """File of `length` bytes at `url` for random access; each read is one request, with retries.

    Reads raise StorageError, because calling libraries would treat an OSError as damaged content.
    """

    def __init__(self, url: str, length: int) -> None:
        super().__init__(None, url, size=length, cache_type="none")

    def readall(self) -> bytes:
        """Read the rest of the file in requests of READ_BYTES, so that only a failed request is repeated."""
        return b"".join(iter(lambda: self.read(READ_BYTES), b""))

    def _fetch_range(self, start: int, end: int) -> bytes:
        return read_range(self.path, start, min(end, self.size))


def list_names(url: str) -> list[str]:
    """Return the sorted names directly under the prefix `url`; empty if there are none."""
    return list(_list(url, detail=False))


def list_types(url: str) -> dict[str, str]:
    """Return the type ("file", "directory", "other") of each name directly under the prefix `url`, sorted by name."""
    return {name: facts["type"] for name, facts in _list(url).items()}


def list_sizes(url: str) -> dict[str, int]:
    """Return the size in bytes of each file directly under the prefix `url`, by name; empty if there are no files."""
    return {name: int(facts["size"]) for name, facts in _list(url).items() if facts["type"] == "file"}


class FileInfo(NamedTuple):
    """A file in a listing: its size in bytes, and when it was written, in seconds since 1970 (inf: unknown)."""

    size: int
    written: float


def list_below(url: str) -> dict[str, FileInfo]:
    """Return each file at any depth below the prefix `url`, by the path from there."""
    fs, path = filesystem(url)
    if not is_local(url):
        listed = _retry(lambda: _call_with_timeout(fs, "find", path, detail=True), "list", url)
        files = {place: FileInfo(int(facts["size"]), _written(facts)) for place, facts in listed.items()}
    else:  # fsspec would leave out a folder in which a file has just been removed
        files = {}
        for place in (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names):
            with contextlib.suppress(FileNotFoundError):
                facts = os.lstat(place)
                files[place] = FileInfo(facts.st_size, facts.st_mtime)
    below = {place[len(path.rstrip("/")) + 1 :]: found for place, found in sorted(files.items())}
    return {name: found for name, found in below.items() if name and not posixpath.basename(name).startswith(TEMPORARY)}


def _written(facts: Mapping[str, Any]) -> float:
    names = (name for name in ("LastModified", "last_modified", "mtime", "created") if name in facts)  # of stores
    moment = facts.get(next(names, ""), math.inf)
    return moment.timestamp() if isinstance(moment, datetime) else float(moment)


def _list(url: str, detail: bool = True) -> dict[str, Any]:
    """Return the entries of fsspec's `ls` by name, sorted, without the place itself, which some stores list."""
    fs, path = filesystem(url)
    try:
        listed = _retry(lambda: list(_call_with_timeout(fs, "ls", path, detail=detail)), "list", url)
    except FileNotFoundError:
        return {}
    places = {(each["name"] if detail else each).rstrip("/"): each for each in listed}
    places.pop(path.rstrip("/"), None)
    found = {place.rsplit("/", 1)[-1]: each for place, each in places.items()}
    return {name: found[name] for name in sorted(found) if name and not name.startswith(TEMPORARY)}


def write_bytes(url: str, data: bytes | memoryview, durable: bool = True) -> None:
    """Publish `data` at `url` as a whole or not at all: temporary file, fsync and rename on a local disk, else one PUT.

    A link is followed; a device or a pipe is written directly. Without `durable` there is no fsync, for files that are
    not read after a crash. Raises StorageError (disk full, no permission, server error).
    """
    fs, path = filesystem(url)
    if is_stream(url):
        with writing(url) as temporary, open(temporary, "wb") as out:
            out.write(data)
        return
    if isinstance(fs, LocalFileSystem):

        def write() -> None:
            with replacing(path, durable) as temporary, open(temporary, "wb") as out:
                out.write(data)

        _retry(write, "write", url)
        return
    payload = bytes(data)
    _retry(lambda: _call_with_timeout(fs, "pipe_file", path, payload, seconds=_seconds_for(len(payload))), "write", url)


def create_bytes(url: str, data: bytes) -> bool:
    """Write `data` at `url` as a whole if there is no file; return whether it was written. Only one writer succeeds.

    If a response is lost, the result may be False although the file was written, so the caller must read the file back.
    On a store without conditional writes all writers succeed, and the last write wins. Raises StorageError.
    """
    fs, path = filesystem(url)

    def create() -> bool:
        try:
            if isinstance(fs, LocalFileSystem):
                _link(path, data)
            else:
                _create_remotely(fs, path, data)
        except FileExistsError:
            return False
        return True

    return _retry(create, "write", url)


@contextlib.contextmanager
def writing(url: str, durable: bool = True) -> Iterator[str]:
    """Yield a local path to write to; its file is published at `url` as a whole when the block ends.

    On a local disk, the file is renamed into place after fsync; a link is followed. For remote storage, a device or a
    pipe, the path is a scratch file in TMPDIR that is uploaded or copied, so memory does not grow with the file. After
    an error nothing is published and no file is left. Without `durable` there is no fsync. Raises StorageError (disk
    full, no permission, server error).
    """
    fs, path = filesystem(url)
    through = is_stream(url)
    try:
        if isinstance(fs, LocalFileSystem) and not through:
            with replacing(path, durable) as temporary:
                yield temporary
            return
        with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
            temporary = os.path.join(folder, path.rsplit("/", 1)[-1][-_END:])
            yield temporary
            if through:
                with open(temporary, "rb") as made, _open_stream(path) as out:
                    shutil.copyfileobj(made, out)
                return
            seconds = _seconds_for(os.path.getsize(temporary))
            _retry(lambda: _call_with_timeout(fs, "put_file", temporary, path, seconds=seconds), "write", url)
    except OSError as error:
        kind, cause = failure_of(error), error.strerror or error
        remedy = _remedy(kind, url)
        if kind is RoomError and not isinstance(fs, LocalFileSystem):
            cause, remedy = f"no space left in {tempfile.gettempdir()}", "set TMPDIR to a folder with more room"
        raise kind(f"could not write {url}: {cause}; {remedy}.") from error


@contextlib.contextmanager
def replacing(path: str, durable: bool) -> Iterator[str]:
    """Yield a name next to `path`, or next to the target of a link; the file replaces `path` when the block ends."""
    path = os.path.realpath(path) if os.path.islink(path) else path
    with _temporary_file(path) as temporary:
        yield temporary
        if durable:
            _sync(temporary, os.O_RDWR)
        os.replace(temporary, path)
        if durable:
            _sync(os.path.dirname(path) or ".", os.O_RDONLY)


def move_files(source: str, target: str, names: Sequence[str]) -> None:
    """Move the files `names` to another prefix of the same store, over existing files; the bytes do not change.

    On a local disk the files are renamed; elsewhere the store copies the files, and the caller removes `source`. Raises
    FileNotFoundError, StorageError.
    """
    fs, start = filesystem(source)
    end = filesystem(target)[1]
    pairs = [(join(start, name), join(end, name)) for name in names]
    if not isinstance(fs, LocalFileSystem):
        with ThreadPoolExecutor(MOVE_THREADS, thread_name_prefix="extremis-move") as pool:
            copy = functools.partial(_call_with_timeout, fs, "cp_file", seconds=FILE_SECONDS)
            urls = [join(target, name) for name in names]
            list(pool.map(lambda pair, url: _retry(lambda: copy(*pair), "copy to", url), pairs, urls))
        return
    folders = {os.path.dirname(place) for _, place in pairs}

    def rename() -> None:
        for folder in folders:
            _make_folder(folder)
        for before, after in pairs:
            if os.path.exists(before) or not os.path.exists(after):  # an earlier attempt may have moved the file
                os.replace(before, after)
        for folder in folders:
            _sync(folder, os.O_RDONLY)

    _retry(rename, "write", target)


def remove(url: str, recursive: bool = False) -> None:
    """Remove a file, or with `recursive` also all files below; a missing file is no error. Raises StorageError."""
    fs, path = filesystem(url)

    def drop() -> None:
        with contextlib.suppress(FileNotFoundError):
            if isinstance(fs, LocalFileSystem):
                fs.rm(path, recursive)
            elif recursive:
                _remove_below(fs, path)
            else:
                _call_with_timeout(fs, "rm_file", path)

    _retry(drop, "remove", url)


def _remove_below(fs: fsspec.AbstractFileSystem, path: str) -> None:
    """Remove the file at `path` and all files below, by their exact names: fsspec's `rm` takes names for patterns."""
    in_folders = not getattr(fs, "async_impl", False)  # an object store has no folders that could be left over
    options = {"withdirs": in_folders, "detail": True, "seconds": FILE_SECONDS}
    found = _call_with_timeout(fs, "find", path, **options)
    if "/" in path:  # else a bucket
        found.setdefault(path, {"type": "file"})
    folders = [name for name, facts in found.items() if in_folders and facts["type"] == "directory"]
    files = [name for name, facts in found.items() if facts["type"] != "directory"]
    if hasattr(fs, "call_s3"):
        for first in range(0, len(files), _BULK):
            _remove_in_bulk(fs, files[first : first + _BULK])
        return
    seconds = CLEAN_UP_SECONDS if thread_state.cleaning_up else REQUEST_SECONDS

    def drop(name: str, method: str = "rm_file") -> None:
        with contextlib.suppress(FileNotFoundError):
            _call_with_timeout(fs, method, name, seconds=seconds)

    with ThreadPoolExecutor(MOVE_THREADS, thread_name_prefix="extremis-remove") as pool:
        list(pool.map(drop, files))
    for name in sorted(folders, reverse=True):
        drop(name, "rmdir")


def _remove_in_bulk(fs: Any, paths: Sequence[str]) -> None:
    """Remove at most _BULK objects of one bucket on S3 by one request. Raises OSError for an object that stays."""
    keys = [fs.split_path(path)[:2] for path in paths]
    request = {"Objects": [{"Key": key} for _, key in keys], "Quiet": True}
    answer = _call_with_timeout(
        fs, "call_s3", "delete_objects", Bucket=keys[0][0], Delete=request, seconds=FILE_SECONDS
    )
    for error in answer.get("Errors", ()):
        kind, number = (PermissionError, errno.EACCES) if error["Code"] == "AccessDenied" else (OSError, errno.EIO)
        raise kind(number, f"{error['Key']}: {error.get('Message', error['Code'])}")


def sha256(data: bytes | memoryview) -> str:
    """Return the hexadecimal SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: str) -> str:
    """Return the hexadecimal SHA-256 of the local file at `path`, read in pieces."""
    with open(path, "rb") as file:
        return stream_sha256(file)


def stream_sha256(file: IO[bytes], on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the hexadecimal SHA-256 of the rest of an open file; `on_bytes(bytes)` is called after each piece."""
    digest = hashlib.sha256()  # Python 3.10 has no hashlib.file_digest
    while piece := file.read(1 << 20):
        digest.update(piece)
        if on_bytes is not None:
            on_bytes(len(piece))
    return digest.hexdigest()


def pack(checksums: Iterable[int]) -> str:
    """Encode checksums for a manifest."""
    return base64.b64encode(np.fromiter(checksums, _CHECKSUM).tobytes()).decode()


def unpack(text: str) -> np.ndarray:
    """Decode checksums uint32 [n], n >= 1. Raises ValueError for a text that `pack` did not produce."""
    data = base64.b64decode(text, validate=True)
    if not data or len(data) % _CHECKSUM.itemsize:
        raise ValueError(f"checksums of {len(data)} bytes, expected a multiple of {_CHECKSUM.itemsize}")
    return np.frombuffer(data, _CHECKSUM)


def write_sealed(url: str, data: bytes, durable: bool = False) -> None:
    """Publish a line with the CRC-32 of `data`, followed by `data`, for `read_sealed`. Raises StorageError."""
    write_bytes(url, seal(data), durable)


def read_sealed(url: str, remedy: str | None = None) -> bytes:
    """Read the data that `write_sealed` wrote; bytes that do not match their checksum are read again.

    Raises FileNotFoundError; StorageError. Damaged bytes raise TableError, with `remedy` at the end of the message, or
    StorageError if `remedy` is None.
    """
    data = read_matching(lambda: unseal(read_bytes(url)), lambda data: data is not None)
    if data is not None:
        return data
    fault = "the content does not match the checksum"
    if remedy is None:
        raise StorageError(f"could not read {url}: the file is damaged: {fault}; fix the cause and run again.")
    raise TableError(f"{url}: damaged: {fault}. {remedy}")


def seal(data: bytes) -> bytes:
    """Return a line with the CRC-32 of `data`, followed by `data`."""
    return b"%08x\n%b" % (crc32(data), data)


def unseal(sealed: bytes) -> bytes | None:
    """Return the data that was given to `seal`; None if the content does not match the checksum."""
    line, _, data = sealed.partition(b"\n")
    return bytes(data) if line == b"%08x" % crc32(data) else None


def read_matching(read: Callable[[], T], matches: Callable[[T], bool]) -> T:
    """Return the result of `read`; if it does not match, call `read` again, because the network may be the cause.

    After READ_ATTEMPTS calls, the last result is returned even if it does not match.
    """
    for _ in range(READ_ATTEMPTS - 1):
        if matches(data := read()):
            return data
    return read()


def write_json(url: str, body: Mapping[str, Any], indent: int | None = None) -> None:
    """Publish `body` at `url`. Raises StorageError."""
    text = json.dumps({**body, _FIELD: _checksum(body)}, indent=indent, sort_keys=True)
    write_bytes(url, text.encode())


def read_json(url: str, remedy: str = "Remove the file, and rerun the command that made it.") -> dict[str, Any]:
    """Read a JSON object; the file is read again if the checksum differs.

    Raises FileNotFoundError, StorageError; TableError, with `remedy` at the end of the message, if the object is
    damaged.
    """

    def matches(body: dict[str, Any] | None) -> bool:
        return body is not None and body.get(_FIELD) == _checksum(body)

    body = read_matching(lambda: parse_object(read_bytes(url)), matches)
    if body is None or not matches(body):
        fault = "not a JSON object" if body is None else "its content does not match its checksum"
        raise TableError(f"{url}: damaged: {fault}. {remedy}")
    del body[_FIELD]
    return body


def parse_object(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object in `data`; None if `data` contains no object, or more than MAX_BYTES."""
    try:
        body = json.loads(data) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _checksum(body: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in body.items() if name != _FIELD}
    return f"{crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def free_bytes(url: str) -> int | None:
    """Return the free bytes at `url` on a local disk, even if `url` does not exist; None on other storage."""
    fs, path = filesystem(url)
    if not isinstance(fs, LocalFileSystem):
        return None
    while not os.path.exists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    room = os.statvfs(path or ".")
    return room.f_bavail * room.f_frsize


def require_room(url: str, needs: Mapping[str, int], remedy: str, begun: bool = False) -> None:
    """Refuse to write more than fits into the free space at `url`; `needs`: lower bounds in bytes per kind of content.

    Only local disks report their free space. Raises PlanError, or RoomError if the work has `begun`, with `remedy` at
    the end of the message.
    """
    free = free_bytes(url)
    if free is None or sum(needs.values()) <= free:
        return
    parts = " and ".join(f"{say_bytes(size)} of {what}" for what, size in needs.items())
    kind = RoomError if begun else PlanError
    raise kind(f"{url}: the command writes at least {parts}, and {say_bytes(free)} are free. {remedy}")


@contextlib.contextmanager
def with_room(url: str, what: str, size: int, remedy: str) -> Iterator[None]:
    """Check that there is space for the block to write about `size` bytes of `what` to a file at `url`.

    The disk of `url` is checked, or of TMPDIR for uploads. Raises RoomError, with `remedy` at the end of the message:
    before the block if space is missing, and inside the block if the disk becomes full.
    """
    place = url if is_local(url) else tempfile.gettempdir()
    if place != url:
        remedy = f"Set TMPDIR to a disk with more room. {remedy}"
    require_room(place, {what: size}, remedy, begun=True)
    try:
        yield
    except RoomError as error:
        text = f"{place}: the disk is full: the command writes about {say_bytes(size)} of {what}. {remedy}"
        raise RoomError(text) from error


@contextlib.contextmanager
def _temporary_file(path: str) -> Iterator[str]:
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f"{TEMPORARY}{uuid.uuid4().hex}-{name[-_END:]}")
    _make_folder(folder or ".")
    try:
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _make_folder(path: str) -> None:
    try:
        os.makedirs(os.path.realpath(path), exist_ok=True)  # follows links
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None


def _descriptor(path: str) -> int | None:
    """Return the file descriptor of this process that `path` names, such as /dev/stdout or /proc/self/fd/1."""
    for _ in range(_MAX_LINKS):
        match = _OPEN_FILE.fullmatch(path)
        if match:
            is_ours = match["process"] in (None, "self", str(os.getpid()))
            return int(match["number"] or match["opened"]) if is_ours else None
        if not os.path.islink(path):
            return None
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return None


def _open_stream(path: str) -> IO[bytes]:
    number = _descriptor(path)
    with Wait(f"a reader of {path}"):  # only a pipe takes that long to open
        return open(path, "wb") if number is None else os.fdopen(os.dup(number), "wb")


def _link(path: str, data: bytes) -> None:
    with _temporary_file(path) as temporary:
        with open(temporary, "wb") as out:
            out.write(data)
        _sync(temporary, os.O_RDWR)
        try:
            os.link(temporary, path)
        except PermissionError:  # a file system without links: a reader may see a part of the file at this moment
            with open(path, "xb") as out:
                out.write(data)


def _create_remotely(fs: fsspec.AbstractFileSystem, path: str, data: bytes) -> None:
    """Write a new object, with a conditional write if the store supports this. Raises FileExistsError."""
    try:
        _call_with_timeout(fs, "pipe_file", path, data, mode="create")
        return
    except (NotImplementedError, TypeError):  # the driver has no conditional writes
        pass
    except OSError as error:
        if error.errno == errno.EEXIST or "PreconditionFailed" in str(error) or "ConditionalRequest" in str(error):
            raise FileExistsError(errno.EEXIST, "the file exists already") from None
        if "NotImplemented" not in str(error):
            raise
    if fs.exists(path):
        raise FileExistsError(errno.EEXIST, "the file exists already")
    _call_with_timeout(fs, "pipe_file", path, data)


def _sync(path: str, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _call_with_timeout(
    fs: fsspec.AbstractFileSystem, method: str, *args: Any, seconds: float | None = None, **options: Any
) -> Any:
    """Call a method of `fs`; raises TimeoutError after `seconds` if the call waits for a network.

    Drops cached listings first, because other processes write to the same storage.
    """
    call, seconds = getattr(fs, method), CLEAN_UP_SECONDS if thread_state.cleaning_up else seconds or REQUEST_SECONDS
    fs.invalidate_cache()
    if getattr(fs, "async_impl", False) and hasattr(call, "__wrapped__"):  # fsspec's own wrapper around a coroutine
        options["timeout"] = seconds
    try:
        return call(*args, **options)
    except FSTimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {seconds:g} seconds") from None


def _seconds_for(size: int) -> float:
    return REQUEST_SECONDS + size / (1 << 20)  # a slow connection writes 1 MiB per second


def _retry(action: Callable[[], T], verb: str, url: str, cancelled: threading.Event | None = None) -> T:
    """Run `action`, again after errors that may pass: ATTEMPTS times, in an outage for as long as `patience` says.

    Pauses become longer. A final error names URL, attempts and cause.
    """
    global retries
    cancelled, began, attempts, code = cancelled or threading.Event(), _clock(), 0, ""
    most, longest = (1, 0.0) if thread_state.cleaning_up else (ATTEMPTS, patience() * thread_state.patient)
    until = "" if longest else f"{most} attempts have failed"
    wait = Wait(f"storage to {verb} {url}", seconds=longest or None, until=until, group="storage")
    wait.due += _MORE_SILENT_SECONDS
    with wait if "://" in url else contextlib.nullcontext():
        while True:
            attempts += 1
            try:
                if code in EXPIRED:
                    _read_credentials_anew(url)
                result = action()
                thread_state.cleaning_up = False
                return result
            except Exception as raised:  # clients of stores raise any kind of error
                error = _explained(raised, url)
            lasted, code = _clock() - began, answer_of(error)[1]
            may_try = attempts < most and lasted < DEADLINE_SECONDS and may_pass(error)
            if not may_try and (lasted >= longest or not is_outage(error)):
                _fail(error, verb, url, attempts)
            wait.cause = _cause_of(error, url)
            _pause(cancelled, _JITTER.uniform(0, min(SLOWEST_SECONDS, 2.0 ** (min(attempts, 9) - 3))))
            if cancelled.is_set():
                _fail(error, verb, url, attempts)
            retries += 1
            for check in before_late_write if verb in _WRITES else ():
                check(url)


def _pause(cancelled: threading.Event, seconds: float) -> None:
    cancelled.wait(seconds)


def _fail(error: Exception, verb: str, url: str, attempts: int) -> NoReturn:
    """Raise `error`, or what it means for the file at `url`."""
    if isinstance(error, ExtremisError):
        raise error
    is_missing = isinstance(error, FileNotFoundError)
    has_bucket = "bucket does not exist" not in str(error) and answer_of(error)[1] != NO_NAME
    if not has_bucket or (is_missing and verb == "write" and not is_local(url)):  # a store has no folders
        raise InputError(
            f"could not {verb} {url}: the bucket does not exist; create the bucket or fix the path."
        ) from error
    if is_missing:
        raise error
    if isinstance(error, IsADirectoryError | NotADirectoryError):
        kind = "a directory" if isinstance(error, IsADirectoryError) else "a path below a file"
        raise InputError(f"could not {verb} {url}: expected a file, got {kind}. Fix the path.") from error
    failure, cause = failure_of(error), _cause_of(error, url)
    raise failure(f"could not {verb} {url} after {attempts} attempt(s): {cause}; {_remedy(failure, url)}.") from error


def _cause_of(error: Exception, url: str) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return redact_known(strerror or str(error) or type(error).__name__, url)


def _explained(error: Exception, url: str) -> Exception:
    """Return `error`; if it is S3's refusal of a HEAD, which says no reason, the error of a LIST of the same prefix."""
    if answer_of(error)[1] in ("400", "403"):
        fs, path = filesystem(url)
        bucket, key, _ = fs.split_path(path)
        try:
            _call_with_timeout(fs, "call_s3", "list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=1)
        except Exception as reason:
            return reason
    return error


def _read_credentials_anew(url: str) -> None:
    """Replace S3's client, which keeps the credentials of its start."""
    fs: Any = filesystem(url)[0]
    if _clock() >= getattr(fs, "renewed_until", 0.0):  # of many threads, one
        fs.session, fs.renewed_until = None, _clock() + 1.0
        _call_with_timeout(fs, "connect", refresh=True)


_REMEDIES: dict[type[StorageError], str] = {
    RoomError: "free some space and run the same command again",
    AccessError: "give this user permission",
    StorageError: "fix the cause and run again",
}


def _remedy(failure: type[StorageError], url: str) -> str:
    of_store = failure is AccessError and not is_local(url)
    return _REMEDIES[failure] + f"; a store takes credentials from {_CREDENTIALS}" * of_store
