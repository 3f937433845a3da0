"""Labels of a batch side by side, by query: what a device needs of own pools to merge them itself."""

from typing import NamedTuple

import numba
import numpy as np

from schemas.tables import PAD

LATER = -2  # in the place of a hard negative that is not known yet


class LaidOut(NamedTuple):
    """Labels [n] of queries that follow each other, without pads; those of query q are [starts[q], starts[q + 1])."""

    label: np.ndarray
    positive: np.ndarray  # bool
    draw: np.ndarray  # bool
    starts: np.ndarray  # [B + 1] int32


def lay_out(positives: np.ndarray, offsets: np.ndarray, hard: np.ndarray | None, draws: np.ndarray) -> LaidOut:
    """Lay side by side positives [P] of B queries (`offsets` [B + 1]), their [B, H] hard negatives and `draws` [B, k].

    Labels are int32 where all of them are less than its greatest, else int64. Hard negatives that are `LATER` keep
    their places, with -1 there. Raises ValueError for 2**31 labels or more in a batch.
    """
    rows = len(offsets) - 1
    hard = np.empty((rows, 0), np.int64) if hard is None else np.ascontiguousarray(hard)
    size = len(positives) + hard.size + draws.size
    if size > np.iinfo(np.int32).max:
        raise ValueError(f"{size} labels in a batch: make the batch smaller")
    greatest = max((int(labels.max()) for labels in (positives, hard, draws) if labels.size), default=0)
    label = np.empty(size, np.int32 if greatest < np.iinfo(np.int32).max else np.int64)
    positive, draw, starts = np.zeros(size, bool), np.zeros(size, bool), np.zeros(rows + 1, np.int32)
    _lay_out(positives, offsets, hard, np.ascontiguousarray(draws), (label, positive, draw, starts))
    return LaidOut(label[: starts[-1]], positive[: starts[-1]], draw[: starts[-1]], starts)


@numba.njit(nogil=True, cache=True)
def _lay_out(positives, offsets, hard, draws, into):  # type: ignore[no-untyped-def]
    label, positive, draw, starts = into
    size = 0
    for row in range(len(offsets) - 1):
        for i in range(offsets[row], offsets[row + 1]):
            label[size] = positives[i]
            positive[size] = True
            size += 1
        for column in range(hard.shape[1]):
            if hard[row, column] != PAD:
                label[size] = max(hard[row, column], PAD)
                size += 1
        for column in range(draws.shape[1]):
            if draws[row, column] != PAD:
                label[size] = draws[row, column]
                draw[size] = True
                size += 1
        starts[row + 1] = size
