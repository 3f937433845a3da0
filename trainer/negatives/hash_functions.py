"""Families of locality-sensitive hash functions: K functions per code, one code per table (LNS, 1.2, A.2 and A.3).

Function j L + t is the j-th of the K functions of table t. A code depends only on the vector and the seed, not on the
batch, because every sum adds the coordinates in order.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np

from schemas.randomness import HashFunctionsStream, Purpose, generator
from trainer.negatives.draws import splitmix64
from trainer.negatives.lsh_section import Family

_MOST_BUCKETS = 1 << 28  # buckets of a table: codes are at most int32
_BLOCK = 8  # rows hashed together, which share each read of a line of directions
_ATTEMPTS = 64  # random attempts of an empty bin to borrow a winner, before it takes the next bin with a winner
_NONE = -1


def open_hashes(family: Family, dimension: int, bits: int, tables: int, seed: int, width: int = 2) -> "HashFunctions":
    """Open the family by name; `width` is m in DWTA. Raises ValueError for an invalid number of buckets, or D < m."""
    width = 2 if family == "simhash" else width
    buckets = width**bits
    if not 2 <= buckets <= _MOST_BUCKETS:
        raise ValueError(f"{buckets} buckets per table; expected 2 to {_MOST_BUCKETS}: change bits")
    if family == "simhash":
        return SimHash(dimension, bits, tables, seed)
    if not 2 <= width <= dimension:
        raise ValueError(f"bins of {width} coordinates out of {dimension}; expected 2 to {dimension}")
    return Dwta(dimension, bits, tables, seed, width)


@dataclass(frozen=True)
class HashFunctions(ABC):
    """A family of hash functions: K `bits` per code, one code per table."""

    dimension: int  # D
    bits: int  # K
    tables: int  # L
    seed: int
    width: int = 2  # number of values of a function: two signs, or the coordinates of a bin

    @property
    def buckets(self) -> int:
        """Number of codes."""
        return self.width**self.bits

    def codes(self, vectors: np.ndarray) -> np.ndarray:
        """Hash `vectors` [n, D] to codes [n, L], of `code_type`. Raises ValueError if D differs."""
        if vectors.ndim != 2 or vectors.shape[1] != self.dimension:
            raise ValueError(f"vectors have shape {vectors.shape}; these functions hash [n, {self.dimension}]")
        codes = np.empty((len(vectors), self.tables), code_type(self.buckets))
        self._hash(np.ascontiguousarray(vectors, np.float32), codes)
        return codes

    @abstractmethod
    def _hash(self, vectors: np.ndarray, codes: np.ndarray) -> None:
        """Write the codes of `vectors` to `codes`."""


@dataclass(frozen=True)
class SimHash(HashFunctions):
    """Signs of Gaussian projections (equation 2): vectors at angle a have equal signs with probability 1 - a / pi."""

    @cached_property
    def directions(self) -> np.ndarray:
        """Directions of the projections, [D, K L] float32."""
        size = self.dimension, self.bits * self.tables
        draw = generator(self.seed, Purpose.HASH_FUNCTIONS, HashFunctionsStream.DIRECTIONS)
        return draw.standard_normal(size, np.float32)

    def _hash(self, vectors: np.ndarray, codes: np.ndarray) -> None:
        _signs(vectors, self.directions, codes)


@dataclass(frozen=True)
class Dwta(HashFunctions):
    """Densified winner-take-all: the index of the largest of the m coordinates in a bin (equation 4), ignoring zeros.

    Bins are cut from permutations of the coordinates. The K bins of a table come from different permutations, because
    p^K requires independence. A bin of zeros borrows the winner of another bin; bins are tried in an order that is the
    same for every vector.
    """

    @cached_property
    def coordinates(self) -> np.ndarray:
        """Coordinates of each function's bin, [K L, m] int32."""
        draw = generator(self.seed, Purpose.HASH_FUNCTIONS, HashFunctionsStream.COORDINATES)
        bins = self.dimension // self.width  # bins per permutation
        each = -(-self.tables // bins)  # permutations that give the bins of function j of every table
        order = draw.permuted(np.tile(np.arange(self.dimension, dtype=np.int32), (self.bits, each, 1)), axis=2)
        cut = order[:, :, : bins * self.width].reshape(self.bits, each * bins, self.width)[:, : self.tables]
        return np.ascontiguousarray(cut.reshape(-1, self.width))

    @cached_property
    def _key(self) -> np.uint64:
        return np.uint64(generator(self.seed, Purpose.HASH_FUNCTIONS, HashFunctionsStream.BORROWING).integers(0, 2**63))

    def _hash(self, vectors: np.ndarray, codes: np.ndarray) -> None:
        _winners(vectors, self.coordinates, self._key, codes)


def code_type(buckets: int) -> np.dtype:
    """Return the narrowest integer type for codes: 1, 2 or 4 bytes."""
    if buckets <= 1 << 8:
        return np.dtype(np.uint8)
    return np.dtype(np.int16 if buckets <= 1 << 15 else np.int32)


@numba.njit(nogil=True, cache=True)
def _signs(vectors: np.ndarray, directions: np.ndarray, codes: np.ndarray) -> None:
    sums = np.empty((_BLOCK, directions.shape[1]), np.float32)
    for start in range(0, len(vectors), _BLOCK):
        rows = min(_BLOCK, len(vectors) - start)
        sums[:] = 0
        for coordinate in range(vectors.shape[1]):
            for row in range(rows):
                value = vectors[start + row, coordinate]
                if value != 0:
                    for function in range(directions.shape[1]):
                        sums[row, function] += value * directions[coordinate, function]
        for row in range(rows):
            _pack_winners((sums[row] > 0).astype(np.int32), 2, np.uint64(0), codes[start + row])


@numba.njit(nogil=True, cache=True)
def _winners(vectors: np.ndarray, coordinates: np.ndarray, key: np.uint64, codes: np.ndarray) -> None:
    functions, width = coordinates.shape
    winner = np.empty(functions, np.int32)
    for row in range(len(vectors)):
        for function in range(functions):
            best, largest = _NONE, np.float32(0)
            for place in range(width):
                value = vectors[row, coordinates[function, place]]
                if value != 0 and (best == _NONE or value > largest):
                    best, largest = place, value
            winner[function] = best
        _pack_winners(winner, width, key, codes[row])


@numba.njit(nogil=True, cache=True)
def _pack_winners(winner: np.ndarray, width: int, key: np.uint64, codes: np.ndarray) -> None:
    tables = len(codes)
    bits = len(winner) // tables
    for table in range(tables):
        code = 0
        for bit in range(bits - 1, -1, -1):
            function = bit * tables + table
            won = winner[function]
            code = code * width + (won if won != _NONE else _borrowed(winner, function, key))
        codes[table] = code


@numba.njit(nogil=True, cache=True)
def _borrowed(winner: np.ndarray, function: int, key: np.uint64) -> int:
    """Return the winner of the first non-empty bin in a random order for `function`; 0 for a vector of zeros."""
    functions = np.uint64(len(winner))
    other = np.uint64(function)
    for attempt in range(_ATTEMPTS):
        other = splitmix64(key, np.uint64(function), np.uint64(attempt)) % functions
        if winner[other] != _NONE:
            return int(winner[other])
    for step in range(len(winner)):
        after = (int(other) + step) % len(winner)
        if winner[after] != _NONE:
            return int(winner[after])
    return 0
