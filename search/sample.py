"""Samples of rows: the same for the same arguments, wherever they are drawn."""

import numpy as np


def sample_rows(rows: int, size: int, seed: int) -> np.ndarray:
    """Draw at most `size` distinct rows of [0, rows), in order: the same for the same arguments. int64 [S]."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    return np.sort(generator.choice(rows, min(size, rows), replace=False, shuffle=False)).astype(np.int64)
