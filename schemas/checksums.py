"""CRC-32 of what a reader of a shard trusts: its end (footer or index) first, then what that end points at.

They stand in the manifest, whose own digest covers them, as base64 of little-endian uint32: a flipped bit anywhere on
the way from storage to a column is found before the column is made.
"""

import base64
import binascii
import zlib
from collections.abc import Iterable

import numpy as np

_TYPE = np.dtype("<u4")


def crc32(data: memoryview | bytes) -> int:
    """CRC-32 of `data`; gives up the interpreter lock while it runs."""
    return zlib.crc32(data)


def pack(checksums: Iterable[int]) -> str:
    """Checksums as they stand in a manifest."""
    return base64.b64encode(np.fromiter(checksums, _TYPE).tobytes()).decode()


def unpack(text: str) -> np.ndarray:
    """Checksums uint32 [n], n >= 1. Raises ValueError where `text` is none that `pack` made."""
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"checksums are no base64: {error}") from None
    if not data or len(data) % _TYPE.itemsize:
        raise ValueError(f"checksums of {len(data)} bytes, expected a multiple of {_TYPE.itemsize}")
    return np.frombuffer(data, _TYPE)
