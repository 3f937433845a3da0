"""Random bits by what they are for: no state, and the same in whatever order they are drawn."""

import numba
import numpy as np


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
