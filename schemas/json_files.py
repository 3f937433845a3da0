"""Small JSON objects on storage with a checksum field: an object that has changed since it was written is refused."""

import json
from collections.abc import Mapping
from typing import Any

from schemas import storage
from schemas.checksums import crc32
from schemas.errors import TableError

MAX_BYTES = 1 << 28  # size of the largest record that is parsed
_FIELD = "crc32"  # checksum of the other fields


def write_json(url: str, body: Mapping[str, Any], indent: int | None = None) -> None:
    """Publish `body` at `url`. Raises StorageError."""
    text = json.dumps({**body, _FIELD: _checksum(body)}, indent=indent, sort_keys=True)
    storage.write_bytes(url, text.encode())


def read_json(url: str, remedy: str = "Remove the file, and rerun the command that made it.") -> dict[str, Any]:
    """Read a JSON object; the file is read again if the checksum differs.

    Raises FileNotFoundError, StorageError; TableError, with `remedy` at the end of the message, if the object is
    damaged.
    """
    body = storage.read_matching(lambda: parse_object(storage.read_bytes(url)), _matches)
    if body is None or not _matches(body):
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


def _matches(body: dict[str, Any] | None) -> bool:
    return body is not None and body.get(_FIELD) == _checksum(body)


def _checksum(body: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in body.items() if name != _FIELD}
    return f"{crc32(json.dumps(rest, sort_keys=True).encode()):08x}"
