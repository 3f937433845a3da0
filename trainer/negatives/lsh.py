"""Negatives from hash tables over the label vectors (LNS): the source, its tables, and its hash functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np

from schemas.ragged import Ragged
from schemas.randomness import HashFunctionsStream, HashTablesStream, Purpose, generator
from trainer.negatives.base import NegativeSource, Sampled, State
from trainer.negatives.draws import splitmix64
from trainer.negatives.lsh_section import Family, LshSection
from trainer.negatives.planner import restrict_to_labels

if TYPE_CHECKING:
    import torch

    from trainer.negatives.base import LabelVectors
    from trainer.stream.batch import Batch

_MOST_BUCKETS = 1 << 28  # buckets of a table: codes are at most int32
_BLOCK = 8  # rows hashed together, which share each read of a line of directions
_ATTEMPTS = 64  # random attempts of an empty bin to borrow a winner, before it takes the next bin with a winner
_NONE = -1
_FILLED = 4096  # rows that are added to one table after another, while their codes stay in the cache
GROWTH = 1.1  # growth factor of the number of steps between two rehashes of touched rows
_HASHED = 1 << 16  # rows of the classifier that are hashed at a time


class HashedNegatives(NegativeSource):
    """Labels from the query's buckets in hash tables over a rank's vectors, the same for the same (epoch, step)."""

    name = "lsh"
    stateful = True

    def __init__(self, options: LshSection, vectors: LabelVectors, seed: int = 0) -> None:
        self.options, self.seed = options, seed
        self._vectors, self._touched = vectors, list[np.ndarray]()
        self.labels, dimension = vectors.vectors.shape
        self.hashes = HashFunctions(options.family, dimension, options.bits, options.tables, seed, options.width)
        self.tables = HashTables(self.labels, options.tables, self.hashes.buckets, options.capacity)
        self._started = False

    def find(self, batch: Batch, x: torch.Tensor | None = None) -> Sampled:
        assert x is not None
        if not self._started:
            self.start()
        own = restrict_to_labels(batch, self._vectors.start, self._vectors.stop)
        positives = Ragged(own.positives, own.positive_offsets)
        labels = self.sample(x.float().cpu().numpy(), positives, epoch=batch.epoch, step=batch.step)
        return Sampled(labels._replace(values=labels.values.astype(np.int64) + self._vectors.start).padded())

    def start(self) -> None:
        """Hash every row, in linear time; a run does this once, unless `load` restores an earlier state."""
        self._started = True
        for start in range(0, self.labels, _HASHED):
            ids = np.arange(start, min(start + _HASHED, self.labels))
            self.tables.insert(start, self.hashes.codes(self._vectors.read(ids)), self._key(0, 0))

    def touch(self, rows: np.ndarray) -> None:
        if self._started:
            self._touched.append(rows)

    def after_step(self, global_step: int, epoch: int, step: int) -> None:
        if is_due(global_step, self.options.every):
            self.rehash(epoch, step)

    def rehash(self, epoch: int, step: int) -> int:
        """Hash the touched rows again; return their number."""
        touched = self.touched
        self._touched.clear()
        for start in range(0, len(touched), _HASHED):
            ids = touched[start : start + _HASHED]
            self.tables.move(ids, self.hashes.codes(self._vectors.read(ids)), self._key(epoch, step))
        return len(touched)

    @property
    def touched(self) -> np.ndarray:
        """Distinct rows to hash again, ascending, int64."""
        return np.unique(np.concatenate(self._touched)) if self._touched else np.empty(0, np.int64)

    def sample(self, x: np.ndarray, positives: Ragged, *, epoch: int, step: int) -> Ragged:
        """Return distinct negatives of B queries, int32, without positives.

        With `query` = "embedding" (Theorem 2), x [B, D] is hashed. With "label" (Theorem 1), a random positive's stored
        code is used instead of a hash of x; a query without a positive gets no negatives.
        """
        draw = generator(self.seed, Purpose.HASH_TABLES, epoch, step, HashTablesStream.QUERIES)
        order = draw.permutation(self.options.tables)
        if self.options.query == "embedding":
            return self.tables.find(self.hashes.codes(x), order, positives, self.options.limit)
        values, offsets = positives
        counts = positives.counts
        queries = np.flatnonzero(counts)
        drawn = values[offsets[queries] + draw.integers(0, counts[queries])]
        # Rows without a positive have no `values`, so removing them does not change the offsets of the other rows.
        without = Ragged(values, np.append(offsets[queries], offsets[-1]))
        labels = self.tables.find(self.tables.codes[drawn], order, without, self.options.limit)
        sizes = np.zeros(len(counts), np.int64)
        sizes[queries] = labels.counts
        return Ragged.from_counts(labels.values, sizes)

    def state(self) -> State:
        return {**self.tables.state(), "touched": self.touched} if self._started else {}

    def load(self, state: State) -> None:
        self.tables.load(state)
        self._touched, self._started = [state["touched"].copy()], True

    def _key(self, epoch: int, step: int) -> int:
        return int(generator(self.seed, Purpose.HASH_TABLES, epoch, step, HashTablesStream.KEPT).integers(0, 2**63))


def is_due(step: int, every: int) -> bool:
    """Return whether a rehash is due after `step` steps: rehash k, GROWTH**k * `every` steps after the previous one.

    LNS, section 3.3: every 50 iterations at first, and exponentially less often later.
    """

    def rehashes(steps: int) -> int:  # the largest k such that every * (GROWTH**k - 1) / (GROWTH - 1) <= steps
        # The term 1e-9 prevents rounding from losing a rehash; at worst, a rehash comes one step early.
        return int(math.log1p(steps * (GROWTH - 1) / every) / math.log(GROWTH) + 1e-9) if steps > 0 else 0

    return rehashes(step) > rehashes(step - 1)


class TableArrays(NamedTuple):
    """Contents of the hash tables.

    `codes` [N, L]: the bucket of each row. `slots` [L, buckets, capacity] int32 contains rows, in the first
    `held` [L, buckets] slots of each bucket. `members` [L, buckets] counts all rows with the bucket's code, and `owed`
    [L, buckets] counts the deletions that no insertion has compensated for.
    """

    codes: np.ndarray
    slots: np.ndarray
    held: np.ndarray
    members: np.ndarray
    owed: np.ndarray


class HashTables:
    """Rows [0, N) in L tables of buckets.

    A bucket keeps a uniform sample of its rows, even after deletions: a later insertion compensates for a deletion
    (random pairing, Gemulla, Lehner and Haas, VLDB 2006).
    """

    def __init__(self, rows: int, tables: int, buckets: int, capacity: int) -> None:
        if not 0 <= rows < 1 << 31 or capacity < 1:
            raise ValueError(f"{rows} rows, buckets of {capacity}; expected less than 2**31 rows, buckets of 1 or more")
        held, members, owed = np.zeros((3, tables, buckets), np.int32)
        slots = np.full((tables, buckets, capacity), -1, np.int32)
        self.codes = np.zeros((rows, tables), code_type(buckets))  # the bucket of each row
        self.arrays = TableArrays(self.codes, slots, held, members, owed)

    def state(self) -> dict[str, np.ndarray]:
        """Return the arrays that later steps depend on: `rows` of the `buckets` [n] in use, counted over all tables."""
        codes, slots, held, members, owed = self.arrays
        buckets = np.flatnonzero((members.ravel() != 0) | (owed.ravel() != 0))
        rows = np.concatenate([table[_filled(counts, table)] for table, counts in zip(slots, held, strict=True)])
        counts = {"held": held.ravel(), "members": members.ravel(), "owed": owed.ravel()}
        used = {name: array[buckets] for name, array in counts.items()}
        return {"codes": codes, "shape": np.array(slots.shape), "buckets": buckets, "rows": rows, **used}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Continue from a `state`. Raises ValueError if the state belongs to different tables."""
        codes, slots, held, *_ = self.arrays
        shape = state["shape"].tolist()
        if state["codes"].shape != codes.shape or state["codes"].dtype != codes.dtype or shape != list(slots.shape):
            raise ValueError(
                f"codes are {state['codes'].dtype}{state['codes'].shape} and slots {shape}; expected "
                f"{codes.dtype}{codes.shape} and {list(slots.shape)}"
            )
        codes[:], slots[:] = state["codes"], -1
        for name in ("held", "members", "owed"):
            array = getattr(self.arrays, name)
            array[:] = 0
            array.ravel()[state["buckets"]] = state[name]
        stops = np.cumsum(held.sum(1, dtype=np.int64))
        parts = np.split(state["rows"], stops[:-1])
        for table, counts, rows in zip(slots, held, parts, strict=True):
            table[_filled(counts, table)] = rows

    def insert(self, first: int, codes: np.ndarray, key: int) -> None:
        """Add rows [first, first + n) with `codes` [n, L]; `key` seeds the reservoirs."""
        self.codes[first : first + len(codes)] = codes
        for start in range(first, first + len(codes), _FILLED):
            stop = min(start + _FILLED, first + len(codes))
            _insert_rows(start, stop, np.uint64(key), self.arrays)

    def move(self, rows: np.ndarray, codes: np.ndarray, key: int) -> None:
        """Move the distinct `rows` [n] to the buckets of their new `codes` [n, L]."""
        _move_rows(rows, codes, np.uint64(key), self.arrays)

    def find(self, codes: np.ndarray, order: np.ndarray, without: Ragged, most: int = 0) -> Ragged:
        """Return the distinct rows in the buckets `codes` [B, L] of each query, int32, without the rows `without`.

        The search visits tables in `order` [L] until a query has `most` rows (0: no maximum).
        """
        tables, _, capacity = self.arrays.slots.shape
        width = min(most or tables * capacity, tables * capacity, len(self.codes))
        size = 1 << max(4, (2 * (width + without.longest)).bit_length())
        seen = np.zeros((2, size), np.int32)  # for each row, the query that last found it
        into = Ragged(np.empty(len(codes) * width, np.int32), np.zeros(len(codes) + 1, np.int64))
        count = _find(codes, order, without, width, self.arrays, seen, into)
        return Ragged(into.values[:count], into.offsets)


def _filled(counts: np.ndarray, slots: np.ndarray) -> np.ndarray:
    return np.arange(slots.shape[1]) < counts[:, None]


@numba.njit(nogil=True, cache=True)
def _insert_rows(first: int, stop: int, key: np.uint64, tables: TableArrays) -> None:
    for table in range(len(tables.slots)):
        for row in range(first, stop):
            _insert(row, table, tables.codes[row, table], key, tables)


@numba.njit(nogil=True, cache=True)
def _move_rows(rows: np.ndarray, codes: np.ndarray, key: np.uint64, tables: TableArrays) -> None:
    for i in range(len(rows)):
        row = rows[i]
        for table in range(len(tables.slots)):
            if tables.codes[row, table] != codes[i, table]:
                _delete(row, table, tables.codes[row, table], tables)
                tables.codes[row, table] = codes[i, table]
                _insert(row, table, codes[i, table], key, tables)


@numba.njit(nogil=True, cache=True)
def _insert(row: int, table: int, code: int, key: np.uint64, tables: TableArrays) -> None:
    held, members, owed = tables.held, tables.members, tables.owed
    bucket, count, capacity = tables.slots[table, code], held[table, code], tables.slots.shape[2]
    members[table, code] += 1
    chance = (splitmix64(key, np.uint64(table), np.uint64(row)) >> np.uint64(11)) * 2.0**-53
    debt = owed[table, code]
    if debt:  # the insertion compensates for a deletion, from the sample or from the other rows
        missing = min(capacity, members[table, code] - 1 + debt) - count
        owed[table, code] = debt - 1
        if int(chance * debt) < missing:
            bucket[count] = row
            held[table, code] = count + 1
    elif count < capacity:
        bucket[count] = row
        held[table, code] = count + 1
    else:
        slot = int(chance * members[table, code])
        if slot < capacity:
            bucket[slot] = row


@numba.njit(nogil=True, cache=True)
def _delete(row: int, table: int, code: int, tables: TableArrays) -> None:
    held, members, owed = tables.held, tables.members, tables.owed
    bucket, count = tables.slots[table, code], held[table, code]
    members[table, code] -= 1
    owed[table, code] = owed[table, code] + 1 if members[table, code] else 0  # an empty bucket starts from zero
    for slot in range(count):
        if bucket[slot] == row:
            bucket[slot] = bucket[count - 1]
            bucket[count - 1] = -1
            held[table, code] = count - 1
            return


@numba.njit(nogil=True, cache=True)
def _find(codes, order, without, most, tables, seen, into):  # type: ignore[no-untyped-def]
    values, offsets = without
    rows, starts = into
    count = 0
    for query in range(len(codes)):
        stop = count + most
        for i in range(offsets[query], offsets[query + 1]):
            _see(values[i], query + 1, seen)
        for i in range(len(order)):
            table = order[i]
            code = codes[query, table]
            for slot in range(tables.held[table, code]):
                if count == stop:
                    break
                row = tables.slots[table, code, slot]
                if _see(row, query + 1, seen):
                    rows[count] = row
                    count += 1
        starts[query + 1] = count
    return count


@numba.njit(nogil=True, cache=True)
def _see(row: int, query: int, seen: np.ndarray) -> bool:
    """Record that `query` has found `row`; return whether the row is new for the query."""
    mask = seen.shape[1] - 1
    hashed = (np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    place = int(hashed) & mask
    while seen[1, place] == query:
        if seen[0, place] == row:
            return False
        place = (place + 1) & mask
    seen[0, place], seen[1, place] = row, query
    return True


@dataclass(frozen=True)
class HashFunctions:
    """Locality-sensitive hash functions: K `bits` per code, one code per table (LNS, 1.2, A.2 and A.3).

    Function j L + t is the j-th of the K functions of table t. A code depends only on the vector and the seed, not on
    the batch, because every sum adds the coordinates in order. `width` is m in DWTA. Raises ValueError for an invalid
    number of buckets, or D < m.
    """

    family: Family
    dimension: int  # D
    bits: int  # K
    tables: int  # L
    seed: int
    width: int = 2

    def __post_init__(self) -> None:
        if not 2 <= self.buckets <= _MOST_BUCKETS:
            raise ValueError(f"{self.buckets} buckets per table; expected 2 to {_MOST_BUCKETS}: change bits")
        if self.family == "dwta" and not 2 <= self.width <= self.dimension:
            raise ValueError(f"bins of {self.width} coordinates of {self.dimension}; expected 2 to {self.dimension}")

    @property
    def buckets(self) -> int:
        """Number of codes."""
        return int((self.width if self.family == "dwta" else 2) ** self.bits)

    def codes(self, vectors: np.ndarray) -> np.ndarray:
        """Hash `vectors` [n, D] to codes [n, L], of `code_type`. Raises ValueError if D differs."""
        if vectors.ndim != 2 or vectors.shape[1] != self.dimension:
            raise ValueError(f"vectors have shape {vectors.shape}; these functions hash [n, {self.dimension}]")
        codes = np.empty((len(vectors), self.tables), code_type(self.buckets))
        vectors = np.ascontiguousarray(vectors, np.float32)
        if self.family == "simhash":
            _signs(vectors, self.directions, codes)
        else:
            _winners(vectors, self.coordinates, self._key, codes)
        return codes

    @cached_property
    def directions(self) -> np.ndarray:
        """Directions [D, K L] float32 of Gaussian projections (equation 2).

        Vectors at angle a have equal signs with probability 1 - a / pi.
        """
        size = self.dimension, self.bits * self.tables
        draw = generator(self.seed, Purpose.HASH_FUNCTIONS, HashFunctionsStream.DIRECTIONS)
        return draw.standard_normal(size, np.float32)

    @cached_property
    def coordinates(self) -> np.ndarray:
        """Coordinates of each function's bin, [K L, m] int32, for densified winner-take-all.

        A function is the index of the largest of the m coordinates (equation 4), ignoring zeros. Bins are cut from
        permutations of the coordinates. The K bins of a table come from different permutations, because p^K requires
        independence. A bin of zeros borrows the winner of another bin, in an order that is the same for every vector.
        """
        draw = generator(self.seed, Purpose.HASH_FUNCTIONS, HashFunctionsStream.COORDINATES)
        bins = self.dimension // self.width  # bins per permutation
        each = -(-self.tables // bins)  # permutations that give the bins of function j of every table
        order = draw.permuted(np.tile(np.arange(self.dimension, dtype=np.int32), (self.bits, each, 1)), axis=2)
        cut = order[:, :, : bins * self.width].reshape(self.bits, each * bins, self.width)[:, : self.tables]
        return np.ascontiguousarray(cut.reshape(-1, self.width))

    @cached_property
    def _key(self) -> np.uint64:
        return np.uint64(generator(self.seed, Purpose.HASH_FUNCTIONS, HashFunctionsStream.BORROWING).integers(0, 2**63))


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
