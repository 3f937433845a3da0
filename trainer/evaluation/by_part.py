"""Metrics by part of a version: of the points that each part brought, and of the labels that it brought."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.ragged import Ragged
from schemas.table import Table
from trainer.evaluation.metrics import Metrics


@dataclass(frozen=True)
class Bounds:
    """Names of parts, and the ids of their rows: part p has [edges[p], edges[p + 1])."""

    names: tuple[str, ...]
    edges: np.ndarray

    @classmethod
    def of(cls, table: Table) -> "Bounds":
        """Return those of a table; no names where it is of one part."""
        edges = np.cumsum([0, *(part.rows for part in table.parts)])
        return cls(tuple(part.name for part in table.parts) if len(table.parts) > 1 else (), edges)

    def part_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the number of each id's part."""
        return np.searchsorted(self.edges, ids, side="right") - 1


class ByPart:
    """Metrics of queries by their part, and of positives by the part of their label, streamed as `Metrics` is."""

    def __init__(
        self, queries: Bounds, labels: Bounds, ks: Sequence[int], inverse_propensity: np.ndarray | None
    ) -> None:
        self._queries, self._labels, self._ks = queries, labels, tuple(ks)
        self._metrics = [Metrics(ks, inverse_propensity) for _ in queries.names]
        self._counts = np.zeros(len(queries.names), np.int64)
        self._positives = np.zeros(len(labels.names), np.int64)
        self._hits = np.zeros((max(ks), len(labels.names)), np.int64)

    def update(self, rows: np.ndarray, top: np.ndarray, positives: Ragged) -> None:
        """Count queries of the ids `rows` [B] by their rankings `top` [B, K] and positives."""
        if self._queries.names:
            parts = self._queries.part_of(rows)
            for part in np.unique(parts).tolist():
                some = np.flatnonzero(parts == part)
                self._metrics[part].update(top[some], positives.take(some))
                self._counts[part] += len(some)
        if self._labels.names:
            count = len(self._labels.names)
            self._positives += np.bincount(self._labels.part_of(positives.entries), minlength=count)
            best = top[:, : len(self._hits)]
            row, rank = np.nonzero(positives.contains(best))
            np.add.at(self._hits, (rank, self._labels.part_of(best[row, rank])), 1)

    def report(self) -> dict[str, Any]:
        """Return metrics x 100 by part of the queries, and R@k x 100 over all positives by part of the labels."""
        report: dict[str, Any] = {}
        if self._queries.names:
            report["parts"] = {
                name: {"queries": int(count), **metrics.result()}
                for name, metrics, count in zip(self._queries.names, self._metrics, self._counts, strict=True)
                if count
            }
        if self._labels.names:
            hits = np.cumsum(self._hits, axis=0)
            report["labels_by_part"] = {
                name: {
                    "labels": int(self._labels.edges[part + 1] - self._labels.edges[part]),
                    "positives": int(self._positives[part]),
                    **{f"R@{k}": 100 * float(hits[k - 1, part]) / int(self._positives[part]) for k in self._ks},
                }
                for part, name in enumerate(self._labels.names)
                if self._positives[part]
            }
        return report
