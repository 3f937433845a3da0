"""Families of locality-sensitive hash functions, K to a code and a code to a table (LNS, sections 1.2, A.2 and A.3).

Function j L + t is number j of table t's K. A code is a function of the vector and the seed alone: every sum runs over
the coordinates in their order, whatever else is hashed beside it, and a sparse vector has the code of its dense form.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numba
import numpy as np

from schemas.ragged import Ragged, SparseRows
from schemas.randomness import HashFunctionsStream, Purpose, generator

FAMILIES = ("simhash", "dwta")
Family = Literal["simhash", "dwta"]
MOST_BUCKETS = 1 << 15
_BLOCK = 8  # rows hashed together, so that a line of directions is read once for all of them
_ATTEMPTS = 64  # of an empty bin to borrow another's winner by chance, before the next one that has one is taken
_NONE = -1


class Hashes(Protocol):
    """K functions for each of L tables. Codes are [n, L], uint8 up to 256 buckets and int16 above."""

    @property
    def tables(self) -> int: ...

    @property
    def buckets(self) -> int: ...

    def codes(self, vectors: np.ndarray) -> np.ndarray:
        """Hash dense `vectors` [n, D]. Raises ValueError for another D."""

    def sparse_codes(self, vectors: SparseRows) -> np.ndarray:
        """Hash sparse vectors: `ids` are coordinates in [0, D), ascending in a row and each once."""


def open_hashes(family: Family, dimension: int, bits: int, tables: int, seed: int, width: int = 2) -> Hashes:
    """Open the family by name; `width` is m of DWTA. Raises ValueError for too many buckets, or no bin."""
    buckets = (2 if family == "simhash" else width) ** bits
    if not 2 <= buckets <= MOST_BUCKETS:
        raise ValueError(f"{buckets} buckets a table; expected 2 to {MOST_BUCKETS}: take other bits")
    if family == "simhash":
        return SimHash(dimension, bits, tables, seed)
    if not 2 <= width <= dimension:
        raise ValueError(f"bins of {width} coordinates out of {dimension}; expected 2 to {dimension}")
    return Dwta(dimension, bits, tables, seed, width)


@dataclass(frozen=True)
class SimHash:
    """Signs of Gaussian projections (equation 2): two vectors at angle a share one with probability 1 - a / pi."""

    dimension: int  # D
    bits: int  # K
    tables: int  # L
    seed: int

    @property
    def buckets(self) -> int:
        return 1 << self.bits

    @cached_property
    def directions(self) -> np.ndarray:
        """[D, K L] float32."""
        size = self.dimension, self.bits * self.tables
        draw = generator(self.seed, Purpose.HASH_FUNCTIONS, HashFunctionsStream.DIRECTIONS)
        return draw.standard_normal(size, np.float32)

    def codes(self, vectors: np.ndarray) -> np.ndarray:
        vectors = _dense(vectors, self.dimension)
        codes = _codes(len(vectors), self)
        _signs(vectors, self.directions, self.bits, codes)
        return codes

    def sparse_codes(self, vectors: SparseRows) -> np.ndarray:
        codes = _codes(vectors.rows, self)
        _sparse_signs(_float32(vectors), self.directions, self.bits, codes)
        return codes


@dataclass(frozen=True)
class Dwta:
    """Densified winner-take-all: which of a bin's m coordinates is the largest (equation 4); zeros take no part.

    Bins are cut from permutations of the coordinates. The K of a table come from different ones, so that they are
    independent, as p^K asks. A bin of zeros borrows the winner of another, the same for every vector.
    """

    dimension: int  # D
    bits: int  # K
    tables: int  # L
    seed: int
    width: int = 2  # m; with 2 the code has K bits

    @property
    def buckets(self) -> int:
        return int(self.width**self.bits)

    @cached_property
    def coordinates(self) -> np.ndarray:
        """Coordinates of each function's bin, [K L, m] int32."""
        draw = generator(self.seed, Purpose.HASH_FUNCTIONS, HashFunctionsStream.COORDINATES)
        bins = self.dimension // self.width  # of a permutation
        each = -(-self.tables // bins)  # permutations that number j of every table's functions takes bins from
        order = draw.permuted(np.tile(np.arange(self.dimension, dtype=np.int32), (self.bits, each, 1)), axis=2)
        cut = order[:, :, : bins * self.width].reshape(self.bits, each * bins, self.width)[:, : self.tables]
        return np.ascontiguousarray(cut.reshape(-1, self.width))

    @cached_property
    def _uses(self) -> Ragged:
        """Places in bins, function m + place, of each of the D coordinates."""
        flat = self.coordinates.reshape(-1)
        counts = np.bincount(flat, minlength=self.dimension)
        return Ragged.from_counts(np.argsort(flat, kind="stable"), counts)

    @cached_property
    def _key(self) -> np.uint64:
        return np.uint64(generator(self.seed, Purpose.HASH_FUNCTIONS, HashFunctionsStream.BORROWING).integers(0, 2**63))

    def codes(self, vectors: np.ndarray) -> np.ndarray:
        vectors = _dense(vectors, self.dimension)
        codes = _codes(len(vectors), self)
        _winners(vectors, self.coordinates, self._key, codes)
        return codes

    def sparse_codes(self, vectors: SparseRows) -> np.ndarray:
        codes = _codes(vectors.rows, self)
        _sparse_winners(_float32(vectors), self._uses, self.coordinates, self._key, codes)
        return codes


def _dense(vectors: np.ndarray, dimension: int) -> np.ndarray:
    if vectors.ndim != 2 or vectors.shape[1] != dimension:
        raise ValueError(f"vectors are {vectors.shape}; these functions hash [n, {dimension}]")
    return np.ascontiguousarray(vectors, np.float32)


def _float32(vectors: SparseRows) -> SparseRows:
    return vectors._replace(values=vectors.values.astype(np.float32))


def code_type(buckets: int) -> np.dtype:
    return np.dtype(np.uint8 if buckets <= 1 << 8 else np.int16)


def _codes(rows: int, hashes: Hashes) -> np.ndarray:
    return np.empty((rows, hashes.tables), code_type(hashes.buckets))


@numba.njit(nogil=True, cache=True)
def _signs(vectors: np.ndarray, directions: np.ndarray, bits: int, codes: np.ndarray) -> None:
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
            _pack_signs(sums[row], bits, codes[start + row])


@numba.njit(nogil=True, cache=True)
def _sparse_signs(vectors: SparseRows, directions: np.ndarray, bits: int, codes: np.ndarray) -> None:
    ids, values, offsets = vectors
    sums = np.empty(directions.shape[1], np.float32)
    for row in range(len(offsets) - 1):
        sums[:] = 0
        for i in range(offsets[row], offsets[row + 1]):
            if values[i] != 0:
                for function in range(directions.shape[1]):
                    sums[function] += values[i] * directions[ids[i], function]
        _pack_signs(sums, bits, codes[row])


@numba.njit(nogil=True, cache=True)
def _pack_signs(sums: np.ndarray, bits: int, codes: np.ndarray) -> None:
    tables = len(codes)
    for table in range(tables):
        code = 0
        for bit in range(bits):
            code |= int(sums[bit * tables + table] > 0) << bit
        codes[table] = code


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
def _sparse_winners(
    vectors: SparseRows, uses: Ragged, coordinates: np.ndarray, key: np.uint64, codes: np.ndarray
) -> None:
    ids, values, offsets = vectors
    bins, starts = uses
    functions, width = coordinates.shape
    winner, largest = np.empty(functions, np.int32), np.empty(functions, np.float32)
    for row in range(len(offsets) - 1):
        winner[:] = _NONE
        for i in range(offsets[row], offsets[row + 1]):
            value = values[i]
            if value == 0:
                continue
            for use in range(starts[ids[i]], starts[ids[i] + 1]):
                function, place = bins[use] // width, bins[use] % width
                best = winner[function]
                # The first of equals wins, as in a bin that is looked through from its beginning.
                if best == _NONE or value > largest[function] or (value == largest[function] and place < best):
                    winner[function], largest[function] = place, value
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
    """Return the winner of the first bin that has one, in an order drawn for `function`; 0 for a vector of zeros."""
    functions = np.uint64(len(winner))
    other = np.uint64(function)
    for attempt in range(_ATTEMPTS):
        other = scrambled(key, np.uint64(function), np.uint64(attempt)) % functions
        if winner[other] != _NONE:
            return int(winner[other])
    for step in range(len(winner)):
        after = (int(other) + step) % len(winner)
        if winner[after] != _NONE:
            return int(winner[after])
    return 0


@numba.njit(nogil=True, cache=True)
def scrambled(key: np.uint64, first: np.uint64, second: np.uint64) -> np.uint64:
    """Return 64 bits that look random for (key, first, second): the finisher of SplitMix64 over their mix."""
    z = key + first * np.uint64(0x9E3779B97F4A7C15)
    for word in (second, np.uint64(0)):
        z += word
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) + np.uint64(0x9E3779B97F4A7C15)
    return z
