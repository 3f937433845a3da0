"""Queries and labels that a ranking does worst, streamed as `Metrics` is."""

from typing import Any

import numpy as np

from schemas.ragged import Ragged

DEPTH = 5  # ranks that a label is looked for in
SHOWN = 20  # queries, and labels


class Weakest:
    """Counts of what was found among the best DEPTH, by query and by label. Memory grows with the split's pairs."""

    def __init__(self) -> None:
        self._hits: list[np.ndarray] = []  # of each query [B]
        self._positives: list[np.ndarray] = []
        self._hit_labels: list[np.ndarray] = []  # one entry a hit
        self._labels: list[np.ndarray] = []  # one entry a positive

    def update(self, top: np.ndarray, positives: Ragged) -> None:
        """Count one batch: `top` [B, K] label ids, best first, -1 pads; `positives`: label ids of B rows."""
        is_hit = positives.contains(top[:, :DEPTH])
        self._hits.append(is_hit.sum(1))
        self._positives.append(positives.counts)
        self._hit_labels.append(top[:, :DEPTH][is_hit])
        self._labels.append(positives.entries)

    def report(self) -> dict[str, Any]:
        """Return {"k", "queries": [row, found, positives], "labels": [label, found, queries]}, the worst first.

        Queries by the share of what could be found, labels by that of their queries; then those with most to find.
        """
        hits, positives = np.concatenate(self._hits), np.concatenate(self._positives)
        rows = np.flatnonzero(positives)
        queries = _worst(rows, hits[rows], positives[rows], np.minimum(positives[rows], DEPTH))
        labels, counts = np.unique(np.concatenate(self._labels), return_counts=True)
        hit_labels, hit_counts = np.unique(np.concatenate(self._hit_labels), return_counts=True)
        label_hits = np.zeros(len(labels), np.int64)
        label_hits[np.searchsorted(labels, hit_labels)] = hit_counts
        return {"k": DEPTH, "queries": queries, "labels": _worst(labels, label_hits, counts, counts)}


def _worst(ids: np.ndarray, hits: np.ndarray, total: np.ndarray, attainable: np.ndarray) -> list[list[int]]:
    """Return SHOWN rows (id, hits, total) [n, 3] of those of which not all that is `attainable` was found."""
    order = np.lexsort((ids, -total, hits / attainable))[:SHOWN]
    order = order[hits[order] < attainable[order]]
    return np.stack([ids, hits, total], 1)[order].tolist()
