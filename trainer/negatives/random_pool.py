"""Random negatives from a mixture of static distributions, and the weights that make their sum unbiased."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schemas.randomness import Purpose, RandomPoolStream, generator


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
        """Draw `size` labels of [0, L), int64."""
        pool = draw_pool(self._count, size, seed=seed, epoch=epoch, step=step)
        if self._live is not None:
            pool = self._live[pool]
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
    """Draw `size` labels uniformly with replacement from [0, labels), int64."""
    return generator(seed, Purpose.RANDOM_POOL, epoch, step, RandomPoolStream.UNIFORM).integers(0, labels, size)
