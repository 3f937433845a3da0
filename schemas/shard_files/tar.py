"""Row groups as bytes of a tar: headers, members and padding laid out at once in NumPy, never a sample at a time.

A sample is its key, the zero-padded id of the row, and one member a column: `000000000007.input_ids.npy` for a list of
numbers, `.key.txt` for a string. POSIX ustar in blocks of 512 bytes, time and owner 0, so that bytes are deterministic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from schemas.ragged import Ragged

BLOCK = 512
END = bytes(2 * BLOCK)  # two zero blocks end an archive
ID_DIGITS = 12
_NPY_HEAD = 128
_LONGEST_NAME = 100
_SIZE = slice(124, 135)  # eleven octal digits
_CHECKSUM = slice(148, 154)  # six octal digits


@dataclass(frozen=True)
class Member:
    """A column as a member of every sample: values of `dtype` after `head` bytes (the .npy header, or none)."""

    column: str
    dtype: np.dtype
    head: int

    @property
    def suffix(self) -> str:
        return f"{self.column}.{'npy' if self.head else 'txt'}"


@dataclass(frozen=True)
class Layout:
    """Layout of the members of B samples, in blocks from the first: `starts` int64 [B, M], and `blocks` in all."""

    starts: np.ndarray
    blocks: int

    @classmethod
    def of(cls, members: Sequence[Member], counts: Mapping[str, np.ndarray]) -> "Layout":
        """Lay out rows with `counts` [B] values, by column."""
        sizes = np.stack([_size(member, counts[member.column]) for member in members], axis=1)
        blocks = 1 + -(-sizes // BLOCK)
        ends = np.cumsum(blocks.reshape(-1))
        return cls((ends - blocks.reshape(-1)).reshape(blocks.shape), int(ends[-1]) if len(ends) else 0)

    def places(self, number: int, member: Member, offsets: np.ndarray) -> np.ndarray:
        """Return the position, in values, of every value of `member`, which is that `number`: int64 [V].

        `offsets` [B + 1]: of the values of each sample.
        """
        starts = ((self.starts[:, number] + 1) * BLOCK + member.head) // member.dtype.itemsize
        return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], np.diff(offsets))


def members_of(schema: pa.Schema) -> list[Member]:
    """Return a member for every column but `query_id`, in order. Raises ValueError for a type that no member holds."""
    return [_member(field) for field in schema if field.name != "query_id"]


def encode(ids: np.ndarray, columns: Mapping[str, Ragged], members: list[Member]) -> np.ndarray:
    """Lay samples out as tar blocks: ids int64 [B] and B rows of each column -> uint8 [bytes].

    Raises ValueError where an id has more than 12 digits.
    """
    if ids.size and not 0 <= ids.min() <= ids.max() < 10**ID_DIGITS:
        raise ValueError(f"a sample's key has {ID_DIGITS} digits; got ids in [{ids.min()}, {ids.max()}]")
    counts = {name: column.counts for name, column in columns.items()}
    layout = Layout.of(members, counts)
    blocks = np.zeros((layout.blocks, BLOCK), np.uint8)
    digits = _ascii(ids, ID_DIGITS, 10)
    for number, member in enumerate(members):
        values, offsets = columns[member.column]
        count = counts[member.column]
        start = layout.starts[:, number]
        blocks[start] = _tar_headers(member, digits, _size(member, count))
        if member.head:
            blocks[start + 1, : member.head] = _npy_headers(member.dtype, count)
        blocks.reshape(-1).view(member.dtype)[layout.places(number, member, offsets)] = values
    return blocks.reshape(-1)


def _member(field: pa.Field) -> Member:
    value_type = field.type.value_type if pa.types.is_list(field.type) else pa.null()
    if pa.types.is_string(field.type):
        member = Member(field.name, np.dtype(np.uint8), 0)
    elif pa.types.is_integer(value_type) or pa.types.is_floating(value_type):
        member = Member(field.name, pa.array([], value_type).to_numpy().dtype, _NPY_HEAD)
    else:
        raise ValueError(f"column {field.name}: a tar holds strings and lists of numbers, not {field.type}")
    if ID_DIGITS + 1 + len(member.suffix) > _LONGEST_NAME:
        raise ValueError(f"column {field.name}: its name is too long for a tar")
    return member


def _size(member: Member, counts: np.ndarray) -> np.ndarray:
    return member.head + counts.astype(np.int64) * member.dtype.itemsize


def _tar_headers(member: Member, digits: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return headers uint8 [B, 512]: the checksum is the sum of all bytes, its own field counted as spaces."""
    head = bytearray(BLOCK)
    head[ID_DIGITS : ID_DIGITS + 1 + len(member.suffix)] = b"." + member.suffix.encode()
    head[100:124] = b"0000644\0" + b"0000000\0" * 2  # mode, owner, group
    head[135:148] = b"\0" + b"00000000000\0"  # end of the size, time
    head[148:156] = b" " * 8
    head[156:157] = b"0"  # a regular file
    head[257:265] = b"ustar\x0000"
    octal = _ascii(sizes, 11)
    sums = sum(head) + digits.sum(axis=1, dtype=np.int64) + octal.sum(axis=1, dtype=np.int64)
    headers = np.repeat(np.frombuffer(head, np.uint8)[None], len(digits), axis=0)
    headers[:, :ID_DIGITS] = digits
    headers[:, _SIZE] = octal
    headers[:, _CHECKSUM] = _ascii(sums, 6)
    headers[:, 154] = 0
    return headers


def _npy_headers(dtype: np.dtype, counts: np.ndarray) -> np.ndarray:
    """Return headers uint8 [B, 128] of .npy files (version 1.0) that hold `counts` [B] values each."""
    lengths, index = np.unique(counts, return_inverse=True)
    text = "{{'descr': {!r}, 'fortran_order': False, 'shape': ({},), }}"
    heads = [text.format(dtype.str, n).ljust(_NPY_HEAD - 11).encode() + b"\n" for n in lengths.tolist()]
    start = b"\x93NUMPY\x01\x00" + (_NPY_HEAD - 10).to_bytes(2, "little")
    return np.frombuffer(b"".join(start + head for head in heads), np.uint8).reshape(-1, _NPY_HEAD)[index]


def _ascii(numbers: np.ndarray, digits: int, base: int = 8) -> np.ndarray:
    """Return ASCII digits uint8 [B, digits]."""
    return (numbers[:, None] // base ** np.arange(digits - 1, -1, -1) % base + ord("0")).astype(np.uint8)
