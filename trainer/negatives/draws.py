"""Random draws for a batch: pools of random labels, and columns of a table for each query."""

from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from schemas import PAD
from schemas.ragged import Ragged
from schemas.randomness import Purpose, RandomPoolStream, generator, philox_state

_LEVELS = 6  # halvings of [0, 1) into 64 cells; each of up to 64 ranks draws only its own cells
_CELLS = 1 << _LEVELS
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STEP, _MIX = np.uint64(0xA0761D6478BD642F), np.uint64(0xE7037ED1A0B428DB)  # constants of wyrand
_AT_ONCE = 8  # draws at a time; a branch for each draw would be slow, because it would be random
_ONE_ROW, _INT32, _INT64 = np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, np.int64)
_WORDS = np.uint64(40)  # bits for a position in the random words of one node or cell of a row


@numba.njit(nogil=True, cache=True)
def splitmix64(key: np.uint64, first: np.uint64, second: np.uint64) -> np.uint64:
    """Return 64 pseudo-random bits for (key, first, second), mixed by the finaliser of SplitMix64."""
    z = key + first * _GOLDEN
    for word in (second, np.uint64(0)):
        z += word
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) + _GOLDEN
    return z


@dataclass(frozen=True, eq=False)
class RandomPool:
    """Labels drawn with replacement: a fraction `by_frequency` in proportion to n_l + 1, the rest uniformly.

    Each draw selects label l with probability q_l = (1 - f) / L + f (n_l + 1) / Z > 0, where f is `by_frequency`. With
    weights 1 / (k q_l), a sum over k draws is an unbiased estimate of the sum over all labels, for any f. `frequency`
    [L] contains n_l. A rank with the labels `label_range` = [start, stop) draws only these labels, counted from start.
    `retired` [L] bool: labels that are never drawn; L in q_l is then the number of the other labels.

    A draw is a number in [0, 1), and each label has an interval of length q_l. For each row, the number of draws in
    each half of [0, 1) is drawn first, then the number in each quarter, and so on down to 64 cells; then the draws
    within each cell are made. Random numbers depend only on seed, step, row and cell, so all ranks together make the
    same draws for any number of ranks.
    """

    labels: int  # L
    by_frequency: float = 0.0
    frequency: np.ndarray | None = None
    label_range: tuple[int, int] | None = None
    retired: np.ndarray | None = None

    def draw(self, count: int, *, seed: int, epoch: int, step: int) -> np.ndarray:
        """Draw `count` labels that all rows of a batch share. Returns this rank's part, int32 if L fits, else int64."""
        labels = self._draw(RandomPoolStream.SHARED, _ONE_ROW, count, seed, epoch, step).values
        return labels if self.label_range is None else labels[labels != PAD]

    def draw_own(self, count: int, rows: np.ndarray, *, seed: int, epoch: int, step: int) -> Ragged:
        """Draw `count` labels for each of the row ids `rows` [B] separately. Returns this rank's part, with padding."""
        return self._draw(RandomPoolStream.OWN, rows, count, seed, epoch, step)

    def weight(self, size: int) -> float | np.ndarray:
        """Return the weight of each of `size` draws: L / size, or 1 / (size q_l) for the rank's labels, float64."""
        return self._inverse / size if self.by_frequency else self._count / size

    def _draw(self, stream: RandomPoolStream, rows: np.ndarray, count: int, seed: int, epoch: int, step: int) -> Ragged:
        words, counters = philox_state(seed, Purpose.RANDOM_POOL, epoch, step, stream)
        key, at = np.array([*words, *counters[1:]], np.uint64), np.ascontiguousarray(rows, np.int64)
        start, stop = self.label_range or (0, self.labels)
        kind = _INT32 if self.labels <= 1 << 31 else _INT64
        if not self.by_frequency:
            # The range [start, stop), counted without retired labels.
            first, last = (
                (start, stop) if self._drawable is None else np.searchsorted(self._drawable, (start, stop)).tolist()
            )
            labels, ends = _draw_labels(key, at, count, self._count, first, last, kind)
            if self._drawable is not None and first < last:
                labels = np.where(labels == PAD, PAD, self._drawable[first:last][labels] - start).astype(kind.dtype)
            return Ragged(labels, ends)
        below = self._cumulative[start - 1] if start else 0.0
        # Rounding may move a number across the border between two cells.
        first, last = int(below * _CELLS - 1e-6), int(self._cumulative[stop - 1] * _CELLS + 1e-6)
        numbers, ends = _draw_numbers(key, at, count, max(0, first), min(last, _CELLS - 1))
        labels = np.searchsorted(self._cumulative, numbers * 2.0**-64, side="right")
        is_own = (labels >= start) & (labels < stop)
        return Ragged(np.where(is_own, labels - start, PAD).astype(kind.dtype), ends)

    @cached_property
    def _drawable(self) -> np.ndarray | None:
        return None if self.retired is None else np.flatnonzero(~self.retired)

    @property
    def _count(self) -> int:
        return self.labels if self._drawable is None else len(self._drawable)

    @property
    def _shares(self) -> np.ndarray:
        """Probability q_l of every label, float64 [L]."""
        if self.frequency is None or len(self.frequency) != self.labels:
            raise ValueError(f"draws by frequency need a number of training points for each of {self.labels} labels")
        live = np.ones(self.labels) if self.retired is None else (~self.retired).astype(np.float64)
        mass = live * (self.frequency.astype(np.float64) + 1)
        return (1 - self.by_frequency) * live / self._count + self.by_frequency * mass / mass.sum()

    @cached_property
    def _cumulative(self) -> np.ndarray:
        sums = np.cumsum(self._shares)
        return sums / sums[-1]

    @cached_property
    def _inverse(self) -> np.ndarray:
        with np.errstate(divide="ignore"):  # retired labels have q_l = 0
            return 1 / self._shares[slice(*self.label_range) if self.label_range else slice(None)]


@intrinsic
def _halves(context, first, second):  # type: ignore[no-untyped-def]

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        wide, word = ir.IntType(128), ir.IntType(64)
        product = builder.mul(*(builder.zext(factor, wide) for factor in arguments))
        halves = [builder.trunc(half, word) for half in (builder.lshr(product, wide(64)), product)]
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), generate


@intrinsic
def popcount(context, word):  # type: ignore[no-untyped-def]
    """Count the set bits of a word."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@numba.njit(nogil=True, cache=True, inline="always")
def _random(word):  # type: ignore[no-untyped-def]
    """Return the 64 random bits at a position in the sequence of wyrand (Wang Yi), which advances by _STEP."""
    high, low = _halves(word, word ^ _MIX)
    return high ^ low


@numba.njit(nogil=True, cache=True)
def _draw_labels(key, rows, count, labels, start, stop, kind):  # type: ignore[no-untyped-def]
    """Draw `count` uniform labels from [0, labels) for each row; return the part in [start, stop), counted from start.

    Also return the end of each row. In the first and the last cell, draws outside the range become padding. A 64-bit
    number u gives label u · labels / 2^64, rounded down, so the number of values u per label differs by at most one.
    """
    first, last = start * _CELLS // labels, min(_CELLS - 1, (stop * _CELLS - 1) // labels)
    counts, keys = _count_in_cells(key, rows, count, first, last)
    drawn, ends = np.empty(counts.sum() + _AT_ONCE, kind.dtype), np.zeros(len(rows) + 1, np.int64)
    size, own, at = np.uint64(labels), np.uint64(stop - start), np.uint64(0)
    for row in range(len(rows)):
        for cell in range(first, last + 1):
            left = np.int64(counts[row, cell - first])
            word, cell_bits = _words_of_cell(keys[row], cell), np.uint64(cell) << np.uint64(64 - _LEVELS)
            while left > 0:
                for i in range(_AT_ONCE):
                    number = cell_bits | (_random(word + np.uint64(i) * _STEP) >> np.uint64(_LEVELS))
                    label = _halves(number, size)[0] - np.uint64(start)
                    drawn[at + np.uint64(i)] = np.int64(label) if label < own else PAD
                word += np.uint64(_AT_ONCE) * _STEP
                at += np.uint64(min(left, _AT_ONCE))
                left -= _AT_ONCE
        ends[row + 1] = at
    return drawn[: np.int64(at)], ends


@numba.njit(nogil=True, cache=True)
def _draw_numbers(key, rows, count, first, last):  # type: ignore[no-untyped-def]
    """Draw `count` 64-bit numbers for each row; return the numbers in the cells [first, last], and each row's end."""
    counts, keys = _count_in_cells(key, rows, count, first, last)
    drawn, ends, at = np.empty(counts.sum(), np.uint64), np.zeros(len(rows) + 1, np.int64), 0
    for row in range(len(rows)):
        for cell in range(first, last + 1):
            word, cell_bits = _words_of_cell(keys[row], cell), np.uint64(cell) << np.uint64(64 - _LEVELS)
            for _ in range(counts[row, cell - first]):
                drawn[at] = cell_bits | (_random(word) >> np.uint64(_LEVELS))
                at += 1
                word += _STEP
        ends[row + 1] = at
    return drawn, ends


@numba.njit(nogil=True, cache=True)
def _words_of_cell(key, cell):  # type: ignore[no-untyped-def]
    return key + ((np.uint64(_CELLS + cell) << _WORDS) * _STEP)


@numba.njit(nogil=True, cache=True)
def _count_in_cells(key, rows, count, first, last):  # type: ignore[no-untyped-def]
    """Return the number of draws per row and cell in [first, last], [B, cells], and the rows' keys [B].

    A draw falls into either half of a node with equal probability, so the number of n draws in the lower half is the
    number of set bits among n random bits. Only nodes above the cells [first, last] are visited.
    """
    counts, keys = np.empty((len(rows), last - first + 1), np.uint32), np.empty(len(rows), np.uint64)
    of_step = np.uint64(0)
    for word in key:
        of_step = splitmix64(of_step, word, np.uint64(0))
    visited = [node for a in range(_LEVELS, 0, -1) for node in range(_CELLS + first >> a, (_CELLS + last >> a) + 1)]
    places = np.array(visited, np.uint64)
    nodes = np.empty(2 * _CELLS, np.uint32)  # the root is node 1, the halves of node n are 2 n and 2 n + 1
    for row in range(len(rows)):
        keys[row] = splitmix64(of_step, np.uint64(rows[row]), np.uint64(0))
        nodes[1] = count
        for node in places:
            lower = _lower_half(keys[row] + (node << _WORDS) * _STEP, nodes[node])
            nodes[node << np.uint64(1)], nodes[node << np.uint64(1) | np.uint64(1)] = lower, nodes[node] - lower
        for cell in range(last - first + 1):
            counts[row, cell] = nodes[_CELLS + first + cell]
    return counts, keys


@numba.njit(nogil=True, cache=True)
def _lower_half(word, draws):  # type: ignore[no-untyped-def]
    left, found = np.uint64(draws), np.uint64(0)
    while left >= np.uint64(64):
        found += popcount(_random(word))
        word += _STEP
        left -= np.uint64(64)
    return np.uint32(found + popcount(_random(word) >> np.uint64(1) >> (np.uint64(63) - left)))


def draw_hard(hard: np.ndarray, rows: np.ndarray, count: int, *, seed: int, epoch: int, step: int) -> np.ndarray:
    """Draw `count` of the K columns [B, K] for each query, in order, by its row id and the step; all if count = K."""
    if count >= hard.shape[1]:
        return hard
    key = generator(seed, Purpose.HARD_COLUMNS, epoch, step).integers(0, 1 << 64, dtype=np.uint64)
    drawn = np.empty((len(hard), count), hard.dtype)
    _draw_columns(hard, rows.astype(np.uint64), key, drawn)
    return drawn


@numba.njit(nogil=True, cache=True)
def _draw_columns(hard: np.ndarray, rows: np.ndarray, key: np.uint64, drawn: np.ndarray) -> None:
    """Select each column with probability (columns still to draw) / (columns left) (Knuth's Algorithm S)."""
    columns, count = hard.shape[1], drawn.shape[1]
    for i in range(len(hard)):
        taken = 0
        for column in range(columns):
            chance = (splitmix64(key, rows[i], np.uint64(column)) >> np.uint64(11)) * 2.0**-53
            if chance * (columns - column) < count - taken:
                drawn[i, taken] = hard[i, column]
                taken += 1
                if taken == count:
                    break
