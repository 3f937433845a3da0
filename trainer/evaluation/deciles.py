"""Parts of P@k that frequent and rare labels bring: bins of labels with equal training mass."""

from collections.abc import Sequence

import numpy as np

from schemas.errors import InputError
from schemas.ragged import Ragged
from trainer.evaluation.metrics import refuse_unknown

BINS = 10


def bins_of_equal_mass(frequency: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Return the bin of each label, most frequent labels first: frequency [L] int64 -> int64 [L] in [0, bins).

    Labels are sorted by training frequency, descending (ties by id), and a label belongs to the bin where its
    share of the total frequency begins; so a bin's mass is a `bins`-th of the total but for the last label in it.
    Labels never seen in training are in the last bin. Raises InputError where no label was ever seen.
    """
    total = int(frequency.sum())
    if total <= 0:
        raise InputError("labels cannot be binned by frequency: none has a training point. Shard a train split first.")
    order = np.argsort(-frequency, kind="stable")
    ordered = frequency[order].astype(np.int64)
    begin = np.cumsum(ordered) - ordered
    result = np.empty(len(frequency), dtype=np.int64)
    result[order] = np.minimum(begin * bins // total, bins - 1)
    return result


class Deciles:
    """The contribution of each bin of `bins_of_equal_mass` to P@k, streamed as `Metrics` is.

    `frequency` is [L] int64, of the train split.
    """

    def __init__(self, frequency: np.ndarray, ks: Sequence[int] = (1, 3, 5, 10)) -> None:
        self.ks = tuple(ks)
        self._bin = bins_of_equal_mass(frequency)
        self._hits = np.zeros((max(self.ks), BINS), dtype=np.int64)
        self._points = 0

    def update(self, top: np.ndarray, positives: Ragged) -> None:
        """Count one batch: top [B, K] label ids best first, -1 pads; positives are label ids.

        Raises InputError for a label id beyond L, ValueError for unequal rows.
        """
        top = top[:, : len(self._hits)]
        refuse_unknown(top, positives.entries, len(self._bin))
        row, rank = np.nonzero(positives.contains(top))
        np.add.at(self._hits, (rank, self._bin[top[row, rank]]), 1)
        self._points += len(top)

    def result(self) -> dict[str, list[float]]:
        """Return metric ("P@1", ...) -> each bin's part of it x 100, most frequent labels first; they add up to P@k."""
        if not self._points:
            raise InputError("there is nothing to measure: no point was evaluated. Is the split empty?")
        upto = np.cumsum(self._hits, axis=0)
        return {f"P@{k}": (100 * upto[k - 1] / (k * self._points)).tolist() for k in self.ks}

    def labels(self) -> list[int]:
        """Count the labels of each bin."""
        return np.bincount(self._bin, minlength=BINS).tolist()
