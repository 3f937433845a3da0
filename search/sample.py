"""Samples of rows: the same for the same arguments, on any machine."""

import numpy as np

from schemas.randomness import Purpose, generator


def sample_rows(rows: int, size: int, seed: int) -> np.ndarray:
    """Draw at most `size` distinct rows of [0, rows), in order: int64 [S]."""
    draw = generator(seed, Purpose.SAMPLE)
    return np.sort(draw.choice(rows, min(size, rows), replace=False, shuffle=False)).astype(np.int64)
