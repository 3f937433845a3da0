"""Draws of some of a table's hard negatives, for each query its own."""

import numba
import numpy as np

from schemas.randomness import Purpose, generator
from trainer.negatives.scrambled import scrambled


def draw_hard(hard: np.ndarray, rows: np.ndarray, count: int, *, seed: int, epoch: int, step: int) -> np.ndarray:
    """Draw `count` of the table's K columns for each query, in their order: [B, K] -> [B, count]; all where count = K.

    A query's draw depends on its row id of `rows` [B] and the step, not on the batch around it.
    """
    if count >= hard.shape[1]:
        return hard
    key = generator(seed, Purpose.HARD_COLUMNS, epoch, step).integers(0, 1 << 64, dtype=np.uint64)
    drawn = np.empty((len(hard), count), hard.dtype)
    _draw(hard, rows.astype(np.uint64), key, drawn)
    return drawn


@numba.njit(nogil=True, cache=True)
def _draw(hard: np.ndarray, rows: np.ndarray, key: np.uint64, drawn: np.ndarray) -> None:
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
