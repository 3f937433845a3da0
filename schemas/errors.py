"""Errors for users: one clear message each, mapped to an exit status by the command line."""

from schemas.secrets import redact


class ExtremisError(Exception):
    """Failure for a known reason; the command line exits with `exit_status`.

    The message has no credentials, whatever URL it was made with.
    """

    exit_status = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(message))


class InputError(ExtremisError):
    """Wrong use or bad input, which the user can fix. Exit status 2."""

    exit_status = 2


class MissingExtra(InputError):
    """Something is not installed that an extra of this project brings: `problem`, and how to install it.

    It names a checkout and the wheel: `extremis` on PyPI is another project, which no message may tell to install.
    """

    def __init__(self, problem: str, extra: str) -> None:
        super().__init__(
            f"{problem}. Install the extra `{extra}`: pip install '.[{extra}]' in a checkout of Extremis, or "
            f"pip install 'extremis_xc-VERSION-py3-none-any.whl[{extra}]' of its wheel."
        )


class TableError(InputError):
    """A table cannot be read: unfinished, foreign, of another version, or damaged. Exit status 2."""


class StorageError(ExtremisError):
    """Storage refused or lost an operation (disk full, no permission, server error). Exit status 1."""
