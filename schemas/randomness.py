"""Counter-based random numbers: a draw is a pure function of (seed, purpose, counters), not of earlier draws.

This module names all streams of random numbers in the project. The number of a stream is part of the key, so this
number never changes and is never reused.
"""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """Purposes of random numbers, each with its counters."""

    # One draw from a whole table: sampled rows, the places of clusters. Resamples of metrics use (0, 0, resample).
    SAMPLE = 0
    INITIAL_WEIGHTS = 1  # (InitialWeights, block of rows)
    ROW_GROUPS = 2  # (epoch)
    WINDOW = 3  # (epoch, stream, window)
    RANDOM_POOL = 4  # (epoch, step, RandomPoolStream)
    HARD_COLUMNS = 5  # (epoch, step)
    # (epoch, step), and the number of the piece (trainer.heads) if a batch is encoded in pieces.
    FEATURE_DROPOUT = 6
    DROPOUT = 7
    MODEL_DROPOUT = 9  # without pieces (epoch, step, first row)
    MIXTURE = 10  # (block of epochs, source)
    HASH_FUNCTIONS = 11  # (HashFunctionsStream)
    HASH_TABLES = 12  # (epoch, step, HashTablesStream)
    ROUNDING = 13  # (step)
    POSITIVES = 14  # (epoch, step); for tuples (epoch, 0, 1)
    CLUSTER_LINES = 15  # (parts that are halved)
    EXCERPT = 16
    LINEAR_RANKER = 17  # order in which labels are fitted
    TURNS = 18  # (epoch)
    SOURCE = 19  # (source); gives the seed of the source's own order
    MINED_RANKS = 20  # hashed with the query and the label


class InitialWeights(IntEnum):
    """Weights that are drawn separately."""

    EMBEDDING = 1
    DENSE = 2
    CLASSIFIER = 3
    PRETRAINED = 4
    PROJECTION = 5


class RandomPoolStream(IntEnum):
    """Pools of a step that are drawn separately; earlier versions used 0 and 1 for pools that all ranks shared."""

    SHARED = 2
    OWN = 3


class HashFunctionsStream(IntEnum):
    """Parts of the hash functions that are drawn separately."""

    DIRECTIONS = 0
    COORDINATES = 1
    BORROWING = 2


class HashTablesStream(IntEnum):
    """Draws of a step for hash tables: which rows full buckets keep, and which tables and positives are queried."""

    KEPT = 0
    QUERIES = 1


def generator(seed: int, purpose: Purpose, *counters: int) -> np.random.Generator:
    """Return a NumPy generator for up to three `counters`. Raises ValueError for more, or for an unknown purpose."""
    key, counter = philox_state(seed, purpose, *counters)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def philox_state(seed: int, purpose: Purpose, *counters: int) -> tuple[list[int], list[int]]:
    """Return the key [2] and the counter [4] of a generator, for code that draws without NumPy. Raises ValueError."""
    if len(counters) > 3:
        raise ValueError(f"at most three counters, got {counters}")
    # The generator itself counts in the lowest counter word, so each (purpose, counters) has 2**64 blocks.
    return [seed & (2**64 - 1), Purpose(purpose)], [0, *counters, *[0] * (3 - len(counters))]


def torch_seed(seed: int, purpose: Purpose, *counters: int) -> int:
    """Return a seed in [0, 2**63) for generators that cannot be keyed by counters."""
    return int(generator(seed, purpose, *counters).integers(0, 2**63))


def sample_rows(rows: int, size: int, seed: int) -> np.ndarray:
    """Draw at most `size` distinct rows of [0, rows), ascending: int64 [S], the same on any machine."""
    draw = generator(seed, Purpose.SAMPLE)
    return np.sort(draw.choice(rows, min(size, rows), replace=False, shuffle=False)).astype(np.int64)
