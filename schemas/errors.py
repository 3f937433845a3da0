"""Errors for users: one clear message each, mapped to an exit status by the command line."""

import errno
import re

from schemas.secrets import redact

# Messages of libraries that raise no MemoryError when memory runs out, or when /dev/shm is full.
_MEMORY = re.compile(
    "(?<!OutOf)MemoryError|bad_alloc|not enough memory|annot allocate memory|CUDA out of memory|start new thread|"
    "failed to map segment"
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
    """Wrong use or bad input, which the user can fix. Exit status 2."""

    exit_status = 2


class RoomError(InputError):
    """A disk has less room than is needed, and may have more later. Exit status 2."""


class MissingExtra(InputError):
    """A package that an extra of this project installs is missing: states `problem` and how to install the package.

    The message names a checkout and the wheel, because `extremis` on PyPI is another project, which users must not
    install by mistake.
    """

    def __init__(self, problem: str, extra: str) -> None:
        super().__init__(
            f"{problem}. Install the extra `{extra}`: pip install '.[{extra}]' in a checkout of Extremis, or "
            f"pip install 'extremis_xc-VERSION-py3-none-any.whl[{extra}]' of its wheel."
        )


class TableError(InputError):
    """A table cannot be read: unfinished, foreign, of a different version, or damaged. Exit status 2."""


class StorageError(ExtremisError):
    """Storage refused or lost an operation (disk full, no permission, server error). Exit status 1."""


def lack_of_memory(error: BaseException | None) -> str | None:
    """Return the message if `error` or its cause is a lack of memory; else None."""
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
