"""Random negatives from a mixture of static distributions, and the weights that make their sum unbiased."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schemas.randomness import Purpose, RandomPool, generator


@dataclass(frozen=True, eq=False)
class Draws:
    """Labels drawn with replacement: a share `by_frequency` as (n_l + 1) ** `power` is, the others uniformly.

    So q_l = (1 - share) / L + share (n_l + 1)^power / Z, which is above 0 for every label: a draw that counts
    1 / (k q_l) makes a sum over k draws an unbiased one over all labels, however the mixture is made. `frequency` [L]
    is n. A rank that holds the labels [start, stop), `part`, is told the weights of those.
    """

    labels: int  # L
    by_frequency: float = 0.0
    power: float = 1.0
    frequency: np.ndarray | None = None
    part: tuple[int, int] | None = None

    def pool(self, size: int, *, seed: int, epoch: int, step: int) -> np.ndarray:
        """`size` labels of [0, L), int64."""
        pool = draw_pool(self.labels, size, seed=seed, epoch=epoch, step=step)
        if not self.by_frequency:
            return pool
        draw = generator(seed, Purpose.RANDOM_POOL, epoch, step, RandomPool.BY_FREQUENCY)
        chosen = draw.random(size) < self.by_frequency
        at = draw.random(int(chosen.sum())) * self._cumulative[-1]
        pool[chosen] = np.searchsorted(self._cumulative, at, side="right")
        return pool

    def weight(self, size: int) -> float | np.ndarray:
        """What one of `size` draws counts: L / size, or of each of the rank's labels 1 / (size q_l), float64."""
        return self._inverse / size if self.by_frequency else self.labels / size

    @cached_property
    def _cumulative(self) -> np.ndarray:
        if self.frequency is None or len(self.frequency) != self.labels:
            raise ValueError(f"draws by frequency need the training points of each of {self.labels} labels")
        return np.cumsum((self.frequency.astype(np.float64) + 1) ** self.power)

    @cached_property
    def _inverse(self) -> np.ndarray:
        shares = np.diff(self._cumulative, prepend=0) / self._cumulative[-1]
        inverse = 1 / ((1 - self.by_frequency) / self.labels + self.by_frequency * shares)
        return inverse if self.part is None else inverse[slice(*self.part)]


def draw_pool(
    labels: int, size: int, *, seed: int, epoch: int, step: int, stream: int = RandomPool.UNIFORM
) -> np.ndarray:
    """`size` labels drawn uniformly with replacement from [0, labels), int64."""
    return generator(seed, Purpose.RANDOM_POOL, epoch, step, stream).integers(0, labels, size)
