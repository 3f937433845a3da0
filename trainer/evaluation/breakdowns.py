"""Metrics per label frequency, per part and for zero-shot labels, streamed like `Metrics`; and the worst queries."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from schemas.errors import InputError
from schemas.ragged import Ragged
from schemas.table import PartTable, Table
from trainer.evaluation.metrics import Metrics, refuse_unknown, with_intervals

BINS = 10


def bins_of_equal_mass(frequency: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Return the bin of each label, most frequent labels first: frequency [L] int64 -> int64 [L] in [0, bins).

    Labels are sorted by training frequency, descending (ties by id); the total frequency of the preceding labels
    determines the bin of a label. Each bin therefore has 1 / `bins` of the total frequency, give or take one label.
    Labels without training points are in the last bin. Raises InputError if no label has training points.
    """
    total = int(frequency.sum())
    if total <= 0:
        raise InputError(
            "cannot bin labels by frequency, because no label has training points. Shard a train split first."
        )
    order = np.argsort(-frequency, kind="stable")
    ordered = frequency[order].astype(np.int64)
    begin = np.cumsum(ordered) - ordered
    result = np.empty(len(frequency), dtype=np.int64)
    result[order] = np.minimum(begin * bins // total, bins - 1)
    return result


class Deciles:
    """The contribution to P@k of each bin that `bins_of_equal_mass` returns, streamed like `Metrics`.

    `frequency` [L] int64: training points of each label.
    """

    def __init__(self, frequency: np.ndarray, ks: Sequence[int] = (1, 3, 5, 10)) -> None:
        self.ks = tuple(ks)
        self._bin = bins_of_equal_mass(frequency)
        self._hits = np.zeros((max(self.ks), BINS), dtype=np.int64)
        self._points = 0

    def update(self, top: np.ndarray, positives: Ragged) -> None:
        """Count one batch: `top` [B, K] label ids, best first, padded with -1; `positives`: label ids of B rows.

        Raises InputError for a label id of L or more, ValueError for unequal rows.
        """
        top = top[:, : len(self._hits)]
        refuse_unknown(top, positives.entries, len(self._bin))
        row, rank = np.nonzero(positives.contains(top))
        np.add.at(self._hits, (rank, self._bin[top[row, rank]]), 1)
        self._points += len(top)

    def result(self) -> dict[str, list[float]]:
        """Return a dict from metric ("P@1", ...) to the contribution of each bin x 100, most frequent labels first.

        The contributions sum to P@k.
        """
        if not self._points:
            raise InputError("no point was evaluated. Is the split empty?")
        upto = np.cumsum(self._hits, axis=0)
        return {f"P@{k}": (100 * upto[k - 1] / (k * self._points)).tolist() for k in self.ks}


class LabelRecall:
    """Recall of the positives in each group of labels, streamed like `Metrics`.

    `group_of` [L] int64: the group of each label; `names`: the names of the groups.
    """

    def __init__(self, group_of: np.ndarray, names: Sequence[str], ks: Sequence[int]) -> None:
        self._group_of, self._names, self._ks = group_of, names, tuple(ks)
        self._positives = np.zeros(len(names), np.int64)
        self._hits = np.zeros((max(ks), len(names)), np.int64)

    def update(self, top: np.ndarray, positives: Ragged) -> None:
        """Count one batch: rankings `top` [B, K] and `positives`."""
        self._positives += np.bincount(self._group_of[positives.entries], minlength=len(self._names))
        best = top[:, : len(self._hits)]
        row, rank = np.nonzero(positives.contains(best))
        np.add.at(self._hits, (rank, self._group_of[best[row, rank]]), 1)

    def result(self) -> dict[str, dict[str, float]]:
        """Return the number of labels and positives, and R@k x 100 over all positives, of each group with positives."""
        labels = np.bincount(self._group_of, minlength=len(self._names))
        counts = zip(self._names, labels.tolist(), self._positives.tolist(), self._hits.cumsum(0).T, strict=True)
        return {
            name: {
                "labels": count,
                "positives": positives,
                **{f"R@{k}": 100 * float(hits[k - 1]) / positives for k in self._ks},
            }
            for name, count, positives, hits in counts
            if positives
        }


class Breakdowns:
    """Metrics per part of the queries; recall of labels per part and per training frequency; streamed like `Metrics`.

    `frequency` [L] int64: training points of each label. The report omits parts if the table has a single part.
    """

    FREQUENCIES = ("0", "1", "2-3", "4-10", "more than 10")

    def __init__(self, queries: Table, labels: Table, frequency: np.ndarray, ks: Sequence[int]) -> None:
        self._parts = list(queries.parts)
        by_frequency = LabelRecall(np.searchsorted([0, 1, 3, 10], frequency), self.FREQUENCIES, ks)
        self._recalls = {"labels_by_frequency": by_frequency}
        if len(labels.parts) > 1:
            part_of = _part_of(np.arange(len(frequency)), labels.parts)
            self._recalls["labels_by_part"] = LabelRecall(part_of, [part.name for part in labels.parts], ks)

    def update(self, top: np.ndarray, positives: Ragged) -> None:
        """Count one batch: rankings `top` [B, K] and `positives`."""
        for recall in self._recalls.values():
            recall.update(top, positives)

    def report(self, metrics: Metrics, rows: np.ndarray) -> dict[str, Any]:
        """Return `metrics` x 100 per part of the queries, and the result of `LabelRecall` per kind of group.

        `rows` [N]: the ids of the queries that `metrics` has counted.
        """
        report: dict[str, Any] = {name: recall.result() for name, recall in self._recalls.items()}
        if len(self._parts) > 1:
            part_of = _part_of(rows, self._parts)
            report["parts"] = {
                part.name: {"queries": count, **metrics.result(part_of == number)}
                for number, part in enumerate(self._parts)
                if (count := int((part_of == number).sum()))
            }
        return report


def _part_of(ids: np.ndarray, parts: Sequence[PartTable]) -> np.ndarray:
    """Return, for each id, the number of the part that contains the id."""
    return np.searchsorted(np.cumsum([part.rows for part in parts]), ids, side="right")


class ZeroShot:
    """Metrics of zero-shot labels, over the queries that have at least one zero-shot positive.

    Only zero-shot labels count as positives. Each query is ranked twice: against the zero-shot labels `labels` [Z]
    int64, and against all labels. `frequency` [L]: training points of each label. `candidates` [C]: the only labels
    that count as zero-shot labels. Raises InputError if every label has training points.
    """

    def __init__(self, frequency: np.ndarray, ks: Sequence[int], candidates: np.ndarray | None = None) -> None:
        self._unseen = frequency == 0
        if candidates is not None:
            self._unseen &= np.isin(np.arange(len(frequency)), candidates)
        self.labels = np.flatnonzero(self._unseen)
        if not len(self.labels):
            raise InputError(
                "every label has training points, so there are no zero-shot labels. Leave --zero-shot out."
            )
        self._alone, self._among_all = Metrics(ks), Metrics(ks)
        self._queries = 0

    def select(self, positives: Ragged) -> tuple[np.ndarray, Ragged]:
        """Return the rows [n] of `positives` that contain a zero-shot label, and the zero-shot labels of these rows."""
        unseen = positives.keep(self._unseen[positives.values])
        rows = np.flatnonzero(unseen.counts)
        return rows, unseen.take(rows)

    def update(
        self, alone: np.ndarray, among_all: np.ndarray, positives: Ragged, texts: np.ndarray | None = None
    ) -> None:
        """Count n queries: both rankings [n, K], best first, the zero-shot positives, and a number of each text [n]."""
        self._queries += positives.rows
        self._alone.update(alone, positives, texts)
        self._among_all.update(among_all, positives, texts)

    def report(self, resamples: int = 1000) -> dict[str, Any]:
        """Return metrics x 100 with intervals, for both rankings; no metrics if no query has a zero-shot positive."""
        report: dict[str, Any] = {"labels": len(self.labels), "queries": self._queries}
        if self._queries:
            report |= {
                "alone": with_intervals(self._alone, resamples),
                "among_all": with_intervals(self._among_all, resamples),
            }
        return report


DEPTH = 5  # number of top ranks in which positives are counted
SHOWN = 20  # number of labels shown
QUERIES = 100  # number of queries shown; many queries may have the same text


class Weakest:
    """Counts of positives among the best DEPTH labels, per query and per label. Memory grows with the split's pairs."""

    def __init__(self) -> None:
        # Hits and positives of each query [B], the label of each hit, and the label of each positive.
        self._batches: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def update(self, top: np.ndarray, positives: Ragged) -> None:
        """Count one batch: `top` [B, K] label ids, best first, padded with -1; `positives`: label ids of B rows."""
        is_hit = positives.contains(top[:, :DEPTH])
        self._batches.append((is_hit.sum(1), positives.counts, top[:, :DEPTH][is_hit], positives.entries))

    def report(self) -> dict[str, Any]:
        """Return {"k", "queries": [row, found, positives], "labels": [label, found, queries]}, both worst first.

        Queries are sorted by the fraction of attainable positives that were found, labels by the fraction of the
        label's queries in which the label was found. Ties are sorted by a query's number of positives, or a label's
        number of queries, largest first.
        """
        hits, positives, hit_labels, of_positives = map(np.concatenate, zip(*self._batches, strict=True))
        rows = np.flatnonzero(positives)
        queries = _worst(rows, hits[rows], positives[rows], np.minimum(positives[rows], DEPTH), QUERIES)
        labels, counts = np.unique(of_positives, return_counts=True)
        label_hits = np.bincount(np.searchsorted(labels, hit_labels), minlength=len(labels))
        return {"k": DEPTH, "queries": queries, "labels": _worst(labels, label_hits, counts, counts, SHOWN)}


def _worst(ids: np.ndarray, hits: np.ndarray, total: np.ndarray, attainable: np.ndarray, most: int) -> list[list[int]]:
    """Return at most `most` rows (id, hits, total) [n, 3], worst first, that have fewer hits than `attainable`."""
    order = np.lexsort((ids, -total, hits / attainable))[:most]
    order = order[hits[order] < attainable[order]]
    return np.stack([ids, hits, total], 1)[order].tolist()
