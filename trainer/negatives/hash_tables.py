"""L hash tables of buckets with a fixed capacity: rows are put in, moved, and found (LNS, section 1.2).

What a table holds does not grow with the rows: a bucket keeps `capacity` of its members. Each row's codes are kept too,
so that a row is found where it was put. Cost of a row: L codes and at most L capacity slots, however many rows there
are.
"""

from typing import NamedTuple

import numba
import numpy as np

from schemas.ragged import Ragged
from trainer.negatives.hash_functions import code_type
from trainer.negatives.lsh_section import Policy
from trainer.negatives.scrambled import scrambled

_FILLED = 4096  # rows put into one table after the other: their codes stay in the processor


class TableArrays(NamedTuple):
    """All that the tables hold.

    `codes` [N, L]: the bucket of each row. `slots` [L, buckets, capacity] int32 holds rows, the first `held`
    [L, buckets] of each bucket. `members` [L, buckets] counts all rows with the bucket's code, `owed` [L, buckets] the
    deletions that no insertion has made up for.
    """

    codes: np.ndarray
    slots: np.ndarray
    held: np.ndarray
    members: np.ndarray
    owed: np.ndarray


class HashTables:
    """Rows [0, N) in L tables of buckets.

    'fifo' keeps the newest rows of a bucket; 'reservoir' keeps a uniform sample, through deletions too: a deletion is
    made up for by a later insertion (random pairing, Gemulla, Lehner and Haas, VLDB 2006).
    """

    def __init__(self, rows: int, tables: int, buckets: int, capacity: int, policy: Policy = "reservoir") -> None:
        if not 0 <= rows < 1 << 31 or capacity < 1:
            raise ValueError(f"{rows} rows in buckets of {capacity}; expected below 2**31 rows, and 1 or more a bucket")
        self.policy = policy
        held, members, owed = np.zeros((3, tables, buckets), np.int32)
        slots = np.full((tables, buckets, capacity), -1, np.int32)
        self.arrays = TableArrays(np.zeros((rows, tables), code_type(buckets)), slots, held, members, owed)

    @property
    def codes(self) -> np.ndarray:
        """[N, L]: the bucket of each row."""
        return self.arrays.codes

    def state(self) -> dict[str, np.ndarray]:
        """Return everything that a later step depends on, by name: of the buckets only those that have something.

        `buckets` are their places [n] among all of all tables; `rows` what they hold, one bucket after the other.
        """
        codes, slots, held, members, owed = self.arrays
        buckets = np.flatnonzero((members.ravel() != 0) | (owed.ravel() != 0))
        rows = np.concatenate([table[_filled(counts, table)] for table, counts in zip(slots, held, strict=True)])
        numbers = {"held": held, "members": members, "owed": owed}
        return {
            "codes": codes,
            "shape": np.array(slots.shape),
            "buckets": buckets,
            "rows": rows,
            **{name: array.ravel()[buckets] for name, array in numbers.items()},
        }

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Go on from a `state`. Raises ValueError where it is of other tables."""
        codes, slots, held, members, owed = self.arrays
        shape = state["shape"].tolist()
        if state["codes"].shape != codes.shape or state["codes"].dtype != codes.dtype or shape != list(slots.shape):
            raise ValueError(
                f"codes are {state['codes'].dtype}{state['codes'].shape} and slots {shape}; expected "
                f"{codes.dtype}{codes.shape} and {list(slots.shape)}"
            )
        codes[:], slots[:] = state["codes"], -1
        for name, array in (("held", held), ("members", members), ("owed", owed)):
            array[:] = 0
            array.ravel()[state["buckets"]] = state[name]
        stops = np.cumsum(held.sum(1, dtype=np.int64))
        parts = np.split(state["rows"], stops[:-1])
        for table, counts, rows in zip(slots, held, parts, strict=True):
            table[_filled(counts, table)] = rows

    def insert(self, first: int, codes: np.ndarray, key: int) -> None:
        """Put rows [first, first + n) with `codes` [n, L], none of which is in yet; `key` seeds the reservoirs."""
        self.codes[first : first + len(codes)] = codes
        for start in range(first, first + len(codes), _FILLED):
            stop = min(start + _FILLED, first + len(codes))
            _insert_rows(start, stop, np.uint64(key), self.policy == "fifo", self.arrays)

    def move(self, rows: np.ndarray, codes: np.ndarray, key: int) -> None:
        """Put `rows` [n], each once and all of them in already, into the buckets of their new `codes` [n, L]."""
        _move_rows(rows, codes, np.uint64(key), self.policy == "fifo", self.arrays)

    def find(self, codes: np.ndarray, order: np.ndarray, without: Ragged, most: int = 0) -> Ragged:
        """Return the union of the buckets that `codes` [B, L] name: rows int32, each once a query.

        Tables are looked through in `order` [L] until a query has `most` rows (0: all). `without`: the rows that each
        query is not to have.
        """
        tables, _, capacity = self.arrays.slots.shape
        width = min(most or tables * capacity, tables * capacity, len(self.codes))
        size = 1 << max(4, (2 * (width + without.longest)).bit_length())
        seen = np.zeros((2, size), np.int32)  # rows, and the query that has each
        into = Ragged(np.empty(len(codes) * width, np.int32), np.zeros(len(codes) + 1, np.int64))
        count = _find(codes, order, without, width, self.arrays, seen, into)
        return Ragged(into.values[:count], into.offsets)


def _filled(counts: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return which of the slots [buckets, capacity] of a table hold a row, the first `counts` [buckets] of each."""
    return np.arange(slots.shape[1]) < counts[:, None]


@numba.njit(nogil=True, cache=True)
def _insert_rows(first: int, stop: int, key: np.uint64, fifo: bool, tables: TableArrays) -> None:
    for table in range(len(tables.slots)):
        for row in range(first, stop):
            _insert(row, table, tables.codes[row, table], key, fifo, tables)


@numba.njit(nogil=True, cache=True)
def _move_rows(rows: np.ndarray, codes: np.ndarray, key: np.uint64, fifo: bool, tables: TableArrays) -> None:
    for i in range(len(rows)):
        row = rows[i]
        for table in range(len(tables.slots)):
            if tables.codes[row, table] != codes[i, table]:
                _delete(row, table, tables.codes[row, table], fifo, tables)
                tables.codes[row, table] = codes[i, table]
                _insert(row, table, codes[i, table], key, fifo, tables)


@numba.njit(nogil=True, cache=True)
def _insert(row: int, table: int, code: int, key: np.uint64, fifo: bool, tables: TableArrays) -> None:
    held, members, owed = tables.held, tables.members, tables.owed
    bucket, count, capacity = tables.slots[table, code], held[table, code], tables.slots.shape[2]
    members[table, code] += 1
    if fifo:
        if count == capacity:
            _shift(bucket, 0, count)
            count -= 1
        bucket[count] = row
        held[table, code] = count + 1
        return
    chance = (scrambled(key, np.uint64(table), np.uint64(row)) >> np.uint64(11)) * 2.0**-53
    debt = owed[table, code]
    if debt:  # it makes up for a deletion: one from the sample, or one from the rest
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
def _delete(row: int, table: int, code: int, fifo: bool, tables: TableArrays) -> None:
    held, members, owed = tables.held, tables.members, tables.owed
    bucket, count = tables.slots[table, code], held[table, code]
    members[table, code] -= 1
    if not fifo:
        owed[table, code] = owed[table, code] + 1 if members[table, code] else 0  # an empty bucket begins anew
    for slot in range(count):
        if bucket[slot] == row:
            if fifo:
                _shift(bucket, slot, count)
            else:
                bucket[slot] = bucket[count - 1]
            bucket[count - 1] = -1
            held[table, code] = count - 1
            return


@numba.njit(nogil=True, cache=True)
def _shift(bucket: np.ndarray, slot: int, count: int) -> None:
    """Close the gap that entry `slot` of `count` leaves, in their order."""
    for i in range(slot, count - 1):
        bucket[i] = bucket[i + 1]


@numba.njit(nogil=True, cache=True)
def _find(
    codes: np.ndarray,
    order: np.ndarray,
    without: Ragged,
    most: int,
    tables: TableArrays,
    seen: np.ndarray,
    into: Ragged,
) -> int:
    """Write rows and offsets to `into`; return the number of rows."""
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
    """Note that `query` has `row`; return whether it is new to it."""
    mask = seen.shape[1] - 1
    hashed = (np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    place = int(hashed) & mask
    while seen[1, place] == query:
        if seen[0, place] == row:
            return False
        place = (place + 1) & mask
    seen[0, place], seen[1, place] = row, query
    return True
