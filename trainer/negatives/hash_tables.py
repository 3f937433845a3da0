"""L hash tables of buckets with a fixed capacity: rows are put in, moved, and found (LNS, section 1.2).

What a table holds does not grow with the rows: a bucket keeps `capacity` of its members. Each row's codes are kept too,
so that a row is found where it was put. Cost of a row: L codes and at most L capacity slots, however many rows there
are.
"""

from typing import Literal

import numba
import numpy as np

from schemas.ragged import Ragged
from trainer.negatives.hash_functions import code_type, scrambled

POLICIES = ("reservoir", "fifo")
Policy = Literal["reservoir", "fifo"]
_FILLED = 4096  # rows put into one table after the other: their codes stay in the processor


class Buckets:
    """Rows [0, N) in L tables.

    `slots` [L, buckets, capacity] int32 holds rows, the first `held` [L, buckets] of each bucket; `members`
    [L, buckets] counts all rows whose code it is. 'fifo' keeps the newest of them; 'reservoir' keeps a uniform sample,
    through deletions too: a deletion is made up for by a later insertion (random pairing, Gemulla, Lehner and Haas,
    VLDB 2006), and `owed` [L, buckets] counts those that are not yet. `codes` [N, L]: the bucket of each row.
    """

    def __init__(self, rows: int, tables: int, buckets: int, capacity: int, policy: Policy = "reservoir") -> None:
        if not 0 <= rows < 1 << 31 or capacity < 1:
            raise ValueError(f"{rows} rows in buckets of {capacity}; expected below 2**31 rows, and 1 or more a bucket")
        self.policy = policy
        self.codes = np.zeros((rows, tables), code_type(buckets))
        self.slots = np.full((tables, buckets, capacity), -1, np.int32)
        self.held, self.members, self.owed = np.zeros((3, tables, buckets), np.int32)

    @property
    def capacity(self) -> int:
        return self.slots.shape[2]

    @property
    def nbytes(self) -> int:
        """What it holds in memory: `codes` grows with the rows, nothing else does."""
        return sum(array.nbytes for array in self.state().values())

    def state(self) -> dict[str, np.ndarray]:
        """Everything that a later step depends on, by name; not copied."""
        return {name: getattr(self, name) for name in ("codes", "slots", "held", "members", "owed")}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Go on from a `state`. Raises ValueError where its shapes are not these."""
        for name, own in self.state().items():
            if state[name].shape != own.shape or state[name].dtype != own.dtype:
                raise ValueError(f"{name} is {state[name].dtype}{state[name].shape}; expected {own.dtype}{own.shape}")
            own[:] = state[name]

    def insert(self, first: int, codes: np.ndarray, key: int) -> None:
        """Put rows [first, first + n) with `codes` [n, L], none of which is in yet; `key` seeds the reservoirs."""
        self.codes[first : first + len(codes)] = codes
        for start in range(first, first + len(codes), _FILLED):
            stop = min(start + _FILLED, first + len(codes))
            _insert_rows(start, stop, np.uint64(key), self.policy == "fifo", *self.state().values())

    def move(self, rows: np.ndarray, codes: np.ndarray, key: int) -> None:
        """Put `rows` [n], each once and all of them in already, into the buckets of their new `codes` [n, L]."""
        _move_rows(rows, codes, np.uint64(key), self.policy == "fifo", *self.state().values())

    def find(self, codes: np.ndarray, order: np.ndarray, without: Ragged, most: int = 0) -> Ragged:
        """Return the union of the buckets that `codes` [B, L] name: rows int32, each once a query.

        Tables are looked through in `order` [L] until a query has `most` rows (0: all). `without`: the rows that each
        query is not to have.
        """
        tables, _, capacity = self.slots.shape
        width = min(most or tables * capacity, tables * capacity, len(self.codes))
        size = 1 << max(4, (2 * (width + without.longest)).bit_length())
        seen = np.zeros((2, size), np.int32)  # who is there, and for which query
        found, starts = np.empty(len(codes) * width, np.int32), np.zeros(len(codes) + 1, np.int64)
        count = _find(codes, order, *without, width, self.slots, self.held, seen, found, starts)
        return Ragged(found[:count], starts)


@numba.njit(nogil=True, cache=True)
def _insert_rows(
    first: int,
    stop: int,
    key: np.uint64,
    fifo: bool,
    codes: np.ndarray,
    slots: np.ndarray,
    held: np.ndarray,
    members: np.ndarray,
    owed: np.ndarray,
) -> None:
    for table in range(len(slots)):
        for row in range(first, stop):
            _insert(row, table, codes[row, table], key, fifo, slots, held, members, owed)


@numba.njit(nogil=True, cache=True)
def _move_rows(
    rows: np.ndarray,
    new: np.ndarray,
    key: np.uint64,
    fifo: bool,
    codes: np.ndarray,
    slots: np.ndarray,
    held: np.ndarray,
    members: np.ndarray,
    owed: np.ndarray,
) -> None:
    for i in range(len(rows)):
        row = rows[i]
        for table in range(len(slots)):
            if codes[row, table] != new[i, table]:
                _delete(row, table, codes[row, table], fifo, slots, held, members, owed)
                codes[row, table] = new[i, table]
                _insert(row, table, new[i, table], key, fifo, slots, held, members, owed)


@numba.njit(nogil=True, cache=True)
def _insert(
    row: int,
    table: int,
    code: int,
    key: np.uint64,
    fifo: bool,
    slots: np.ndarray,
    held: np.ndarray,
    members: np.ndarray,
    owed: np.ndarray,
) -> None:
    bucket, count, capacity = slots[table, code], held[table, code], slots.shape[2]
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
        at = int(chance * members[table, code])
        if at < capacity:
            bucket[at] = row


@numba.njit(nogil=True, cache=True)
def _delete(
    row: int,
    table: int,
    code: int,
    fifo: bool,
    slots: np.ndarray,
    held: np.ndarray,
    members: np.ndarray,
    owed: np.ndarray,
) -> None:
    bucket, count = slots[table, code], held[table, code]
    members[table, code] -= 1
    if not fifo:
        owed[table, code] = owed[table, code] + 1 if members[table, code] else 0  # an empty bucket begins anew
    for at in range(count):
        if bucket[at] == row:
            if fifo:
                _shift(bucket, at, count)
            else:
                bucket[at] = bucket[count - 1]
            bucket[count - 1] = -1
            held[table, code] = count - 1
            return


@numba.njit(nogil=True, cache=True)
def _shift(bucket: np.ndarray, at: int, count: int) -> None:
    """Close the gap that the entry `at` of `count` leaves, in their order."""
    for i in range(at, count - 1):
        bucket[i] = bucket[i + 1]


@numba.njit(nogil=True, cache=True)
def _find(
    codes: np.ndarray,
    order: np.ndarray,
    values: np.ndarray,
    offsets: np.ndarray,
    most: int,
    slots: np.ndarray,
    held: np.ndarray,
    seen: np.ndarray,
    found: np.ndarray,
    starts: np.ndarray,
) -> int:
    count = 0
    for query in range(len(codes)):
        stop = count + most
        for i in range(offsets[query], offsets[query + 1]):
            _see(values[i], query + 1, seen)
        for i in range(len(order)):
            table = order[i]
            code = codes[query, table]
            for at in range(held[table, code]):
                if count == stop:
                    break
                row = slots[table, code, at]
                if _see(row, query + 1, seen):
                    found[count] = row
                    count += 1
        starts[query + 1] = count
    return count


@numba.njit(nogil=True, cache=True)
def _see(row: int, query: int, seen: np.ndarray) -> bool:
    """Whether `row` is new to `query`; it is not afterwards."""
    mask = seen.shape[1] - 1
    at = (np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    place = int(at) & mask
    while seen[1, place] == query:
        if seen[0, place] == row:
            return False
        place = (place + 1) & mask
    seen[0, place], seen[1, place] = row, query
    return True
