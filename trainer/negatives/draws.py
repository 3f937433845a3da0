"""Draws of a batch: random pools from a mixture of static distributions, and columns of a table for each query."""

from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from schemas.randomness import Purpose, RandomPoolStream, generator, philox_state

_FACTORS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)  # of Philox4x64
_STEPS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)


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


@dataclass(frozen=True, eq=False)
class RandomPool:
    """Labels drawn with replacement: a share `by_frequency` as (n_l + 1) ** `power` is, the others uniformly.

    So q_l = (1 - share) / L + share (n_l + 1)^power / Z, which is above 0 for every label: a draw that counts
    1 / (k q_l) makes a sum over k draws an unbiased one over all labels, however the mixture is made. `frequency` [L]
    is n. A rank that holds the labels [start, stop), `part`, has the weights of those. `retired` [L]
    bool: labels that are never drawn; L is then the number of the others.
    """

    labels: int  # L
    by_frequency: float = 0.0
    power: float = 1.0
    frequency: np.ndarray | None = None
    part: tuple[int, int] | None = None
    retired: np.ndarray | None = None

    def draw(self, size: int, *, seed: int, epoch: int, step: int) -> np.ndarray:
        """Draw `size` labels of [0, L), int32 where L fits, else int64."""
        pool = draw_pool(self._count, size, seed=seed, epoch=epoch, step=step)
        if self._live is not None:
            pool = self._live[pool].astype(pool.dtype)
        if not self.by_frequency:
            return pool
        draw = generator(seed, Purpose.RANDOM_POOL, epoch, step, RandomPoolStream.BY_FREQUENCY)
        frequent = draw.random(size) < self.by_frequency
        mass = draw.random(int(frequent.sum())) * self._cumulative[-1]
        pool[frequent] = np.searchsorted(self._cumulative, mass, side="right")
        return pool

    def weight(self, size: int) -> float | np.ndarray:
        """Return what one of `size` draws counts: L / size, or 1 / (size q_l) of each of the rank's labels, float64."""
        return self._inverse / size if self.by_frequency else self._count / size

    @cached_property
    def _live(self) -> np.ndarray | None:
        return None if self.retired is None else np.flatnonzero(~self.retired)

    @property
    def _count(self) -> int:
        return self.labels if self._live is None else len(self._live)

    @cached_property
    def _cumulative(self) -> np.ndarray:
        if self.frequency is None or len(self.frequency) != self.labels:
            raise ValueError(f"draws by frequency need the training points of each of {self.labels} labels")
        mass = (self.frequency.astype(np.float64) + 1) ** self.power
        return np.cumsum(mass if self.retired is None else np.where(self.retired, 0.0, mass))

    @cached_property
    def _inverse(self) -> np.ndarray:
        shares = np.diff(self._cumulative, prepend=0) / self._cumulative[-1]
        inverse = 1 / ((1 - self.by_frequency) / self._count + self.by_frequency * shares)
        return inverse if self.part is None else inverse[slice(*self.part)]


def draw_pool(labels: int, size: int, *, seed: int, epoch: int, step: int) -> np.ndarray:
    """Draw `size` labels uniformly with replacement from [0, labels): int32 where they fit, or int64.

    They are those of `generator(...).integers`, whose making alone takes longer than to draw a shared pool here.
    """
    counters = epoch, step, RandomPoolStream.UNIFORM
    if not (1 < labels <= 1 << 31 and 0 <= seed < 1 << 63):  # NumPy rounds greater seeds, by way of float64
        return generator(seed, Purpose.RANDOM_POOL, *counters).integers(0, labels, size)
    key, counter = philox_state(seed, Purpose.RANDOM_POOL, *counters)
    pool = np.empty(size, np.int32)
    _draw_labels(np.array([*key, *counter], np.uint64), labels, pool)
    return pool


@intrinsic
def _high(context, first, second):  # type: ignore[no-untyped-def]
    """Return the high 64 bits of a product."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(factor, wide) for factor in arguments))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


@numba.njit(nogil=True, cache=True)
def _draw_labels(state, labels, pool):  # type: ignore[no-untyped-def]
    """Draw blocks of Philox4x64-10 (Salmon et al., 2011), and scale the halves of their words to [0, labels).

    Halves that would favour some labels are left out (Lemire, 2019).
    """
    low, factor, refused = np.uint64(0xFFFFFFFF), np.uint64(labels), np.uint64((1 << 32) % labels)
    drawn, number = 0, state[2]
    while drawn < len(pool):
        number += np.uint64(1)
        first, second, third, fourth = number, state[3], state[4], state[5]
        key, other_key = state[0], state[1]
        for _ in range(10):
            high, other_high = _high(_FACTORS[0], first), _high(_FACTORS[1], third)
            lows = _FACTORS[1] * third, _FACTORS[0] * first
            first, third = other_high ^ second ^ key, high ^ fourth ^ other_key
            second, fourth = lows
            key, other_key = key + _STEPS[0], other_key + _STEPS[1]
        for word in (first, second, third, fourth):
            for half in (word & low, word >> np.uint64(32)):
                product = half * factor
                if drawn < len(pool):
                    pool[drawn] = np.int32(product >> np.uint64(32))
                drawn += (product & low) >= refused


def draw_hard(hard: np.ndarray, rows: np.ndarray, count: int, *, seed: int, epoch: int, step: int) -> np.ndarray:
    """Draw `count` of the table's K columns for each query, in their order: [B, K] -> [B, count]; all where count = K.

    A query's draw depends on its row id of `rows` [B] and the step, not on the batch around it.
    """
    if count >= hard.shape[1]:
        return hard
    key = generator(seed, Purpose.HARD_COLUMNS, epoch, step).integers(0, 1 << 64, dtype=np.uint64)
    drawn = np.empty((len(hard), count), hard.dtype)
    _draw_columns(hard, rows.astype(np.uint64), key, drawn)
    return drawn


@numba.njit(nogil=True, cache=True)
def _draw_columns(hard: np.ndarray, rows: np.ndarray, key: np.uint64, drawn: np.ndarray) -> None:
    """Take each column with the chance of what is still to be drawn among what is left (Knuth's Algorithm S)."""
    columns, count = hard.shape[1], drawn.shape[1]
    for i in range(len(hard)):
        taken = 0
        for column in range(columns):
            chance = (scrambled(key, rows[i], np.uint64(column)) >> np.uint64(11)) * 2.0**-53
            if chance * (columns - column) < count - taken:
                drawn[i, taken] = hard[i, column]
                taken += 1
                if taken == count:
                    break
