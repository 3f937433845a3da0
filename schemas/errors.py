"""Errors for users: each error has one clear message, and an exit status for the command line."""

import errno
import os
import re

from schemas.secrets import redact

# Messages of libraries that raise no MemoryError when memory runs out, or when /dev/shm is full.
_MEMORY = re.compile(
    "(?<!OutOf)MemoryError|bad_alloc|not enough memory|annot allocate memory|CUDA out of memory|start new thread|"
    "failed to map segment"
)
# Messages of a full disk, of which some libraries hide the number; the last is Python's if all disks are full.
_ROOM = re.compile(
    "No space left on device|Disk quota exceeded|File too large|requested and [0-9]+ written|No usable temporary dir"
)
_SHARED = re.compile(r"shared memory (?:object|segment)|shared memory\(shm\)|workers are out of shared memory")


class ExtremisError(Exception):
    """Failure for a known reason; the command line exits with `exit_status`.

    The message contains no credentials.
    """

    exit_status = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(message))


class InputError(ExtremisError):
    """Incorrect usage or invalid input, which the user can fix. Exit status 2."""

    exit_status = 2


class RoomError(InputError):
    """A disk has too little free space now, but may have more later. Exit status 2."""


class MissingExtra(InputError):
    """A package from an extra of this project is missing; the message gives `problem` and how to install the extra.

    The message refers to a checkout and the wheel, because `extremis` on PyPI is a different project, which users must
    not install by mistake.
    """

    def __init__(self, problem: str, extra: str) -> None:
        super().__init__(
            f"{problem}. Install the extra `{extra}`: pip install '.[{extra}]' in a checkout of Extremis, or "
            f"pip install 'extremis_xc-VERSION-py3-none-any.whl[{extra}]' with the wheel."
        )


class TableError(InputError):
    """A table cannot be read: unfinished, damaged, of a different version, or not an Extremis table. Exit status 2."""


class StorageError(ExtremisError):
    """A storage operation failed (disk full, no permission, server error). Exit status 1."""


class MissingBucketError(StorageError):
    """A bucket does not exist. Exit status 2."""

    exit_status = 2


def lack_of_room(error: BaseException | None) -> str | None:
    """Return a message if `error` or one of its causes is a full disk: TMPDIR's, as outputs have StorageErrors."""
    import tempfile  # only needed here

    while error is not None:
        if _ROOM.search(str(error)):
            place = getattr(error, "filename", None) or tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
            return f"no space left in {place}. Free some space, or set TMPDIR to a folder with more room."
        error = error.__cause__ or error.__context__
    return None


def lack_of_memory(error: BaseException | None) -> str | None:
    """Return a message if `error` or one of its causes is a lack of memory, otherwise None."""
    while error is not None:
        text = str(error)
        if _SHARED.search(text):
            cause = text.splitlines()[0][:200]
            return f"/dev/shm is full ({cause}). Give the container more shared memory (docker run --shm-size=2g)."
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or _MEMORY.search(text):
            return (
                "out of memory. Give the process more memory (ulimit -v), or use a smaller batch, dimension or "
                "--memory."
            )
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
