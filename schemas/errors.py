"""Errors with their exit statuses, how messages spell options, and credentials that no message shows."""

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

# Matches user:password@ and user@, but not container@account. A password may contain slashes; host:8080/path@v1 has a
# port and no password.
_USER = re.compile(
    r"(?<=://)(?:[^/\s@'\"<>]*:(?![0-9]+(?:[/\s'\"<>]|$))[^\s'\"<>]*@|(?<!abfs://)(?<!abfss://)[^/\s@'\"<>]+@)"
)
_BUCKET = re.compile(r"(?i)(?<![a-z0-9])(?:s3a?|gcs|gs)://(?!arn:)(?=[^/\s'\"<>]*[:@])[^\s'\"<>]*?(?=[\s'\"<>]|$)")
_QUERY = re.compile(
    r"(?i)(?<=[?&])((?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|sig|token|access_token|"
    r"awsaccesskeyid|googleaccessid|api_?key|secret|password|key)=)[^&\s'\"<>#]+"
)
# Control characters: they move the cursor, change colours, or turn the direction of writing.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")


def redact(text: str) -> str:
    """In every URL in `text`, replace user names, passwords, and signatures and tokens in the query with `***`."""
    if "://" not in text:
        return text
    return _QUERY.sub(r"\1***", _USER.sub("***@", _BUCKET.sub(_hide_bucket, text)))


def without_controls(text: str) -> str:
    """Replace each control character in `text`, except tabs and line ends, with a replacement character."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def redact_known(text: str, url: str) -> str:
    """Redact `text`, and also replace the user name and password of `url` wherever they appear in `text`."""
    for match in _USER.finditer(url):
        user, _, password = match[0][:-1].partition(":")
        for secret in filter(None, (match[0][:-1], password, user)):
            text = text.replace(secret, "***")
    return redact(text)


def has_credentials(url: str) -> bool:
    """Return whether an S3 or GCS URL has credentials before the bucket name, which never contains a colon or an @."""
    return _BUCKET.search(url) is not None


def _hide_bucket(match: re.Match[str]) -> str:
    """Keep the scheme and the part after the last @, which contains no secret."""
    scheme, _, rest = match[0].partition("://")
    _, mark, place = rest.rpartition("@")
    return f"{scheme}://***@{place}" if mark else f"{scheme}://***"


# Environment variable: "shell" if messages name options as the command line does. Child processes inherit it.
FRONT_END = "EXTREMIS_FRONT_END"


@contextlib.contextmanager
def front_end(name: str) -> Iterator[None]:
    """Spell options for the front end `name` in the block; a process that has inherited a front end keeps that one."""
    inherited = os.environ.get(FRONT_END)
    os.environ.setdefault(FRONT_END, name)
    try:
        yield
    finally:
        if inherited is None:
            del os.environ[FRONT_END]


def option(name: str, value: Any = None) -> str:
    """Spell an option of a Python function, with a value, as a user types it: `max_tokens=5`, or `--max-tokens 5`.

    Capitals are a placeholder. A mapping has changes to a recipe (`set`), or names of columns (`fields`).
    """
    shell = os.environ.get(FRONT_END) == "shell"
    if not shell:
        return name if value is None else f"{name}={_literal(value, shell)}"
    flag = flag_of(name)
    if isinstance(value, bool) or value is None:
        return f"--no-{flag[2:]}" if value is False else flag
    if not isinstance(value, Mapping):
        return f"{flag} {_literal(value, shell)}"
    pairs = [f"{key}={_literal(part, shell)}" for key, part in value.items()]
    return " ".join(f"{flag} {pair}" for pair in (pairs if name == "set" else [",".join(pairs)]))


def flag_of(name: str) -> str:
    """Return the flag of an option in a shell."""
    words = {"from_run": "from", "purpose": "for"}  # keywords of Python
    return f"--{words.get(name, name).replace('_', '-')}"


def _literal(value: Any, shell: bool) -> str:
    import json  # only needed here
    import shlex

    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(key)}: {_literal(part, shell)}' for key, part in value.items())}}}"
    if isinstance(value, float):
        return f"{value:g}"
    if shell:
        return str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))
    is_text = isinstance(value, str) and not re.fullmatch("[A-Z]+", value)
    return json.dumps(value, ensure_ascii=False) if is_text else str(value)


class ExtremisError(Exception):
    """Failure for a known reason; the command line exits with `exit_status`, which docs/troubleshooting.md explains.

    The message contains no credentials.
    """

    exit_status = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(message))


class InputError(ExtremisError):
    """Incorrect usage or invalid input, which the user can fix. Exit status 2.

    The fault of one parameter has its facts: `parameter` as Python names it, what it `got`, what was `expected`, and a
    `remedy`. Without a `message` they are the message: "PARAMETER: expected …, got …. REMEDY".
    """

    exit_status = 2

    def __init__(
        self,
        message: str = "",
        *,
        parameter: str | None = None,
        got: str | None = None,
        expected: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.parameter, self.expected, self.remedy = parameter, expected, remedy
        self.got = None if got is None else redact(got)
        if parameter is not None and not message:
            name = option(parameter) if parameter.isidentifier() else parameter  # no key of a recipe, such as a.b
            message = f"{name}: expected {expected}{'' if got is None else f', got {got}'}."
            message += f" {remedy}" if remedy else ""
        super().__init__(message)


class PlanError(InputError):
    """Work that has not begun does not fit on a disk, which may have more room later. Exit status 2."""


class DivergedError(ExtremisError):
    """A model computes numbers that are not finite, and would again with the same settings. Exit status 2."""

    exit_status = 2


class TableError(InputError):
    """A table cannot be read: unfinished, damaged, of a different version, or not an Extremis table. Exit status 2."""


class PeerError(ExtremisError):
    """Another program has ended or does not answer: an engine, a rank, a hub, the miner. Exit status 3."""

    exit_status = 3


class StorageError(ExtremisError):
    """Storage does not answer, or failed. Exit status 3."""

    exit_status = 3


class AccessError(StorageError):
    """Storage refuses access: no permission, or wrong credentials. Exit status 4."""

    exit_status = 4


class ClaimedError(ExtremisError):
    """Another process is writing this output. Exit status 5."""

    exit_status = 5


class ClaimLostError(ClaimedError):
    """Another process has taken over the claim of this process. Exit status 5."""


class RoomError(StorageError):
    """A disk, a quota or memory became full during the work. Exit status 6."""

    exit_status = 6


# The same command fails again, so nothing should start it again by itself.
LASTING_STATUSES = InputError.exit_status, AccessError.exit_status


def missing_extra(problem: str, extra: str) -> InputError:
    """Return the error for a missing package of an extra of this project: `problem`, and how to install the extra.

    It names a checkout and the wheel, because `extremis` on PyPI is a different project, which users must not install
    by mistake.
    """
    return InputError(
        f"{problem}. Install the extra `{extra}`: pip install '.[{extra}]' in a checkout of Extremis, or "
        f"pip install 'extremis_xc-VERSION-py3-none-any.whl[{extra}]' with the wheel."
    )


def failure_of(error: BaseException) -> type[StorageError]:
    """Return the class for an error of a system call or of a store's client."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RoomError
    answered = any(getattr(error, name, None) in (401, 403) for name in ("status", "code"))  # by HTTP
    refused = answered or isinstance(error, PermissionError) or number == errno.EROFS
    return AccessError if refused or type(error).__name__ in _NO_CREDENTIALS else StorageError


def failure_of_hub(error: BaseException) -> type[ExtremisError]:
    """Return PeerError if the hub cannot be reached or has a fault, otherwise InputError: it lacks what was named."""
    cause: BaseException | None = error
    while cause is not None and type(cause).__name__ != "OfflineModeIsEnabled":
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        if isinstance(cause, ConnectionError | TimeoutError) or type(cause).__name__ == "gaierror" or status >= 500:
            return PeerError
        cause = cause.__cause__ or cause.__context__
    return InputError


_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "RefreshError"}
# Messages of libraries that raise no MemoryError when memory runs out, or when /dev/shm is full.
_MEMORY = re.compile(
    "(?<!OutOf)MemoryError|bad_alloc|not enough memory|annot allocate memory|CUDA out of memory|start new thread|"
    "failed to map segment"
)
_SHARED = re.compile(r"shared memory (?:object|segment)|shared memory\(shm\)|workers are out of shared memory")
# Messages of a full disk, of which some libraries hide the number; the last is Python's if all disks are full.
_ROOM = re.compile(
    "No space left on device|Disk quota exceeded|File too large|requested and [0-9]+ written|No usable temporary dir"
)


def recognise(error: BaseException) -> ExtremisError | None:
    """Return our error for any error: itself, or what a library lacked in `error` or its causes; None for a bug."""
    cause: BaseException | None = error
    found = error if isinstance(error, ExtremisError) else None
    if found is None and failure_of(error) is AccessError:
        found = AccessError(f"{error}. Give this user permission, or choose another path.")
    while cause is not None:
        text = str(cause)
        if _SHARED.search(text):
            line = text.splitlines()[0][:200]
            return RoomError(
                f"/dev/shm is full ({line}). Give the container more shared memory (docker run --shm-size=2g)."
            )
        if isinstance(cause, MemoryError) or getattr(cause, "errno", None) == errno.ENOMEM or _MEMORY.search(text):
            return RoomError(
                "out of memory. Give the process more memory (ulimit -v), or use a smaller batch, dimension or "
                f"{option('memory')}."
            )
        if found is None and _ROOM.search(text):  # TMPDIR's: outputs have StorageErrors
            place = getattr(cause, "filename", None) or tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
            found = RoomError(f"no space left in {place}. Free some space, or set TMPDIR to a folder with more room.")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return found
