"""Counter-based random numbers: a draw is a pure function of (seed, purpose, counters), not of earlier draws."""

import numpy as np

PURPOSES = (
    "initial weights",
    "row groups",
    "window",
    "random pool",
    "hard columns",
    "feature dropout",
    "dropout",
    "audit",
    "model dropout",
    "mixture",
    "hash functions",
    "hash tables",
    "rounding",
    "positives",
)


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """A NumPy generator for up to three `counters` (epoch, step, ...). Raises ValueError for an unknown purpose."""
    if purpose not in PURPOSES:
        raise ValueError(f"unknown purpose {purpose!r}; known: {', '.join(PURPOSES)}")
    if len(counters) > 3:
        raise ValueError(f"at most three counters, got {counters}")
    padded = [*counters, 0, 0, 0][:3]
    key = [seed & (2**64 - 1), PURPOSES.index(purpose) + 1]
    # The lowest counter word is the generator's own: each (purpose, counters) owns 2**64 blocks.
    return np.random.Generator(np.random.Philox(key=key, counter=[0, *padded]))


def torch_seed(seed: int, purpose: str, *counters: int) -> int:
    """A seed in [0, 2**63) for generators that cannot be keyed by counters."""
    return int(generator(seed, purpose, *counters).integers(0, 2**63))
