"""64-bit hashes of strings, computed one column at a time, to assign rows to shards and to compare rows.

Each value is read as 8-byte words, and the finaliser of SplitMix64 mixes in every word (Steele, Lea, Flood 2014).
Collisions cost time but do no harm, because rows are ordered by (hash, key).
"""

import functools
import hashlib
import re
import unicodedata

import numpy as np
import pyarrow as pa

from schemas.shard_files.parquet import list_column, string_bytes

# A longer value is hashed with BLAKE2b, so that a long value does not add steps for the whole column.
_LONG = 512


def hash_strings(column: pa.Array, seed: int) -> np.ndarray:
    """Hash each value of a string or binary column, or of a list column of numbers [B], with a salt: uint64 [B]."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_nested(column.type):
        numbers, offsets = list_column(pa.table({"rows": column}), "rows")
        return hash_bytes(np.ascontiguousarray(numbers).view(np.uint8), offsets * numbers.itemsize, seed)
    return hash_bytes(*string_bytes(column.cast(pa.large_binary())), seed) if len(column) else np.zeros(0, np.uint64)


def hash_texts(texts: pa.Array, rule: str, seed: int) -> np.ndarray:
    """Hash texts in the form that `rule` compares: equal (`normalized`) or near (`near`), with a salt: uint64 [B]."""
    form = near if rule == "near" else normalized
    return hash_strings(pa.array([form(text) for text in texts.to_pylist()], pa.string()), seed)


def hash_bytes(content: np.ndarray, offsets: np.ndarray, seed: int) -> np.ndarray:
    """Hash content[offsets[i] : offsets[i + 1]] for each i, salted with `seed` in [0, 2^64): uint64 [B]."""
    if len(offsets) < 2:
        return np.zeros(0, np.uint64)
    starts, lengths = offsets[:-1], np.diff(offsets)
    low, high = int(offsets[0]), int(offsets[-1])
    # A word may start at any byte, so the last word may extend beyond the content.
    padded = np.concatenate([content[low:high], np.zeros(8, np.uint8)])
    words_at = np.ndarray((high - low + 1,), "<u8", padded.data, strides=(1,))
    hashes = _mix(np.uint64(seed) ^ _mix(lengths.astype(np.uint64)))
    long = lengths > _LONG
    words = np.where(long, 0, (lengths + 7) >> 3)
    rows = np.arange(len(lengths))
    for word in range(int(words.max(initial=0))):
        rows = rows[words[rows] > word]
        value = words_at[starts[rows] - low + 8 * word]
        left = np.minimum(lengths[rows] - 8 * word, 8).astype(np.uint64)
        value &= np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(64) - (left << np.uint64(3)))
        hashes[rows] = _mix(hashes[rows] ^ value)
    salt = seed.to_bytes(8, "little")
    for row in np.flatnonzero(long).tolist():
        some = content[starts[row] : starts[row] + lengths[row]].tobytes()
        hashes[row] = np.frombuffer(hashlib.blake2b(some, digest_size=8, salt=salt).digest(), "<u8")[0]
    return hashes


def combine(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Combine two columns of hashes into one hash per row: uint64 [B]. The order of the columns matters."""
    return _mix(_mix(first) ^ second)


def in_hash_range(hashes: np.ndarray, hash_range: tuple[float, float]) -> np.ndarray:
    """Return which hashes [B], scaled to [0, 1), are in [low, high). Uses high bits; low bits choose the shard."""
    position = (hashes >> np.uint64(32)).astype(np.float64) / 2**32
    return (position >= hash_range[0]) & (position < hash_range[1])


def _mix(z: np.ndarray) -> np.ndarray:
    # Without the increment, 0 would be mapped to itself.
    with np.errstate(over="ignore"):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def normalized(text: str) -> str:
    """Return a text in NFKC form, case-folded, with single spaces and without leading or trailing punctuation.

    The characters # % & * @ are not removed, and a text that consists only of punctuation keeps its punctuation.
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    words = " ".join(text.split())
    return words.strip(_surrounding()) or words


def near(text: str) -> str:
    """Return the distinct words of a text, sorted; a word consists of letters and digits."""
    text = normalized(text)
    return " ".join(sorted({*re.findall(r"[^\W_]+", text)})) or text


@functools.cache
def _surrounding() -> str:
    characters = (chr(code) for code in range(1 << 16))
    # Some characters stay: C# is not C.
    return " " + "".join(c for c in characters if unicodedata.category(c)[0] == "P" and c not in "#%&*@")
