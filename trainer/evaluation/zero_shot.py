"""Metrics of labels without a training point: zero-shot and generalised zero-shot (Gupta et al., KDD 2021)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from schemas.errors import InputError
from schemas.ragged import Ragged
from trainer.evaluation.intervals import with_intervals
from trainer.evaluation.metrics import Metrics


class ZeroShot:
    """Metrics of zero-shot labels over the queries that have one of them, or more, among their positives.

    These alone count as positives. Each query is ranked twice: against the zero-shot labels `labels` [Z] int64, and
    against all labels. `frequency` [L] are the labels' training points; of `candidates` [C] where there is a choice.
    Raises InputError where every label has one.
    """

    def __init__(self, frequency: np.ndarray, ks: Sequence[int], candidates: np.ndarray | None = None) -> None:
        self._unseen = frequency == 0
        if candidates is not None:
            self._unseen &= np.isin(np.arange(len(frequency)), candidates)
        self.labels = np.flatnonzero(self._unseen)
        if not len(self.labels):
            raise InputError("there is no zero-shot label: every label has a training point. Leave --zero-shot out.")
        self._alone, self._among_all = Metrics(ks), Metrics(ks)
        self._queries = 0

    def select(self, positives: Ragged) -> tuple[np.ndarray, Ragged]:
        """Return the rows [n] of `positives` with a zero-shot one, and their zero-shot ones."""
        unseen = positives.keep(self._unseen[positives.values])
        rows = np.flatnonzero(unseen.counts)
        return rows, unseen.take(rows)

    def update(self, alone: np.ndarray, among_all: np.ndarray, positives: Ragged) -> None:
        """Count queries [n] by both rankings [n, K], best first, and their zero-shot positives."""
        self._queries += positives.rows
        self._alone.update(alone, positives)
        self._among_all.update(among_all, positives)

    def report(self, resamples: int = 1000) -> dict[str, Any]:
        """Return metrics x 100 with their intervals, by both rankings; none where no query has such a positive."""
        report: dict[str, Any] = {"labels": len(self.labels), "queries": self._queries}
        if self._queries:
            report |= {
                "alone": with_intervals(self._alone, resamples),
                "among_all": with_intervals(self._among_all, resamples),
            }
        return report
