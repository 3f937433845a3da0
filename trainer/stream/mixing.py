"""Mixing of sources, each dealt as often as its weight says: pure arithmetic on row-group sizes.

A source of N rows and weight w gives each row floor(w) times an epoch, and round((w - floor(w)) * N) of its rows once
more. Which ones is chosen by (seed, epoch, source): row groups are permuted anew every b = floor(N / rows chosen)
epochs, and each of the b takes the next range of rows of that permutation. So the choice is whole row groups but for
the two that the range cuts, no row is chosen twice within b epochs, and w = 0.5 deals each row once in two epochs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from schemas.randomness import Purpose, generator


@dataclass(frozen=True)
class Share:
    """A source's place in the mix: its `groups` row groups, the next ones in storage order, dealt `weight` times."""

    groups: int
    weight: float


def split_weight(weight: float, rows: int) -> tuple[int, int]:
    """Return (times that each of a source's `rows` rows is dealt, rows that are dealt once more)."""
    whole = math.floor(weight)
    return whole, round((weight - whole) * rows)


def count_rows(dealt: np.ndarray, mix: Sequence[Share]) -> int:
    """Count the rows of an epoch, the same in every epoch; `dealt` [M, 2] as in `pieces_of`."""
    group_rows = dealt[:, 1] - dealt[:, 0]
    if not mix:
        return int(group_rows.sum())
    total = 0
    for _, first, stop, share in _ranges(mix):
        rows = int(group_rows[first:stop].sum())
        whole, more = split_weight(share.weight, rows)
        total += whole * rows + more
    return total


def pieces_of(dealt: np.ndarray, mix: Sequence[Share], seed: int, epoch: int) -> np.ndarray:
    """Return the pieces that `epoch` deals, in storage order: (row group, first row within it, end) [E, 3] int64.

    `dealt` [M, 2]: the rows [first, end) of each row group that are dealt at all, in storage order; without a `mix`
    each of them once.
    """
    whole_groups = np.column_stack([np.arange(len(dealt)), dealt])
    if not mix:
        return whole_groups
    pieces = [np.empty((0, 3), np.int64)]
    for source, first, stop, share in _ranges(mix):
        groups = whole_groups[first:stop]
        times, more = split_weight(share.weight, int(_sizes(groups).sum()))
        pieces.append(np.tile(groups, (times, 1)))
        if more:
            pieces.append(_choose(groups, more, seed, epoch, source))
    return np.concatenate(pieces)


def _choose(groups: np.ndarray, rows: int, seed: int, epoch: int, source: int) -> np.ndarray:
    """Choose `rows` rows out of the pieces `groups` [m, 3] of one source, as pieces [e, 3]."""
    epochs = int(_sizes(groups).sum()) // rows
    number, part = divmod(epoch, epochs)
    permuted = groups[generator(seed, Purpose.MIXTURE, number, source).permutation(len(groups))]
    ends = np.cumsum(_sizes(permuted))
    starts = ends - _sizes(permuted)
    first = np.maximum(starts, part * rows)
    stop = np.minimum(ends, (part + 1) * rows)
    pieces = np.stack([permuted[:, 0], permuted[:, 1] + first - starts, permuted[:, 1] + stop - starts], axis=1)
    return pieces[first < stop]


def _sizes(pieces: np.ndarray) -> np.ndarray:
    return pieces[:, 2] - pieces[:, 1]


def _ranges(mix: Sequence[Share]) -> Iterator[tuple[int, int, int, Share]]:
    """Yield (number, first row group, end, share) of each source."""
    stop = 0
    for number, share in enumerate(mix):
        first, stop = stop, stop + share.groups
        yield number, first, stop, share
