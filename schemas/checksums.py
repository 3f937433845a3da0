"""CRC-32 checksums of a shard: first of the footer or index at its end, then of each part that this footer points to.

The manifest stores the checksums as base64 of little-endian uint32, and the manifest's digest covers the checksums. So
a bit that flips anywhere between storage and a column is detected before the column is created.
"""

import base64
from collections.abc import Iterable

import numpy as np

try:
    from zlib_ng.zlib_ng import (
        crc32,
    )  # ten times as fast as zlib's CRC-32
except ImportError:  # for machines where the package cannot be installed
    from zlib import crc32

__all__ = ["crc32", "pack", "unpack"]
_TYPE = np.dtype("<u4")


def pack(checksums: Iterable[int]) -> str:
    """Encode checksums for a manifest."""
    return base64.b64encode(np.fromiter(checksums, _TYPE).tobytes()).decode()


def unpack(text: str) -> np.ndarray:
    """Decode checksums uint32 [n], n >= 1. Raises ValueError for a text that `pack` did not produce."""
    data = base64.b64decode(text, validate=True)
    if not data or len(data) % _TYPE.itemsize:
        raise ValueError(f"checksums of {len(data)} bytes, expected a multiple of {_TYPE.itemsize}")
    return np.frombuffer(data, _TYPE)
