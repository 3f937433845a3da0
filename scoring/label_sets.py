"""Precision, recall and F1 of sets of predicted labels: per query, micro and macro, as in scikit-learn.

The set of a query is its first k labels, or its labels with at least a score. For h hits among p predicted labels and n
positives, precision is h / p, recall is h / n, and F1 is 2 h / (p + n); 0 / 0 counts as 0.

    samples  mean over queries of the value of a query; F1 is F1@k of `trainer.evaluation.metrics`
    micro    value of h, p and n summed over all queries
    macro    mean of the value of a label over the labels that are a positive or predicted at least once

The names are those of `precision_recall_fscore_support`, which takes its macro mean over the labels in its arguments:
macro F1 is the mean of the labels' F1, not the F1 of mean precision and mean recall.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from schemas import PAD
from schemas.ragged import Ragged
from trainer.evaluation.metrics import refuse_unknown
from trainer.inputs import Inputs

_MEASURES = "precision", "recall", "F1"


class LabelSets:
    """Counts of the sets of the first k labels, for each of `ks`, and of the labels that score `threshold` or more.

    `labels`: L, the number of labels. Takes 4 bytes per label for each count.
    """

    def __init__(self, labels: int, ks: Collection[int], threshold: float | None = None) -> None:
        self._ks, self._threshold = sorted(ks), threshold
        sets = len(self._ks) + (threshold is not None)
        self._found = np.zeros((sets, 2, labels), np.int32)  # hits and predictions of each label
        self._positives = np.zeros(labels, np.int32)
        self._of_queries = np.zeros((sets, len(_MEASURES)))  # sums over queries
        self._queries = self._cut_off = 0

    def collect(self, top: np.ndarray, scores: np.ndarray, positives: Ragged, inputs: Inputs | None = None) -> None:
        """Count one batch: `top` [B, K] label ids, best first, padded with -1, and their `scores` [B, K].

        Raises InputError for a label id of L or more.
        """
        depth = self._ks[-1]
        top, scores = top[:, :depth], scores[:, :depth]
        refuse_unknown(top, positives.entries, len(self._positives))
        is_hit, is_predicted = positives.contains(top), top != PAD
        sets = [is_predicted & (np.arange(top.shape[1]) < k) for k in self._ks]
        if self._threshold is not None:
            sets.append(is_predicted & (scores >= self._threshold))
            self._cut_off += int((sets[-1].sum(axis=1) == depth).sum())
        for number, chosen in enumerate(sets):
            hits = chosen & is_hit
            for counts, ids in zip(self._found[number], (top[hits], top[chosen]), strict=True):
                np.add.at(counts, ids, 1)
            self._of_queries[number] += _measure(hits.sum(axis=1), chosen.sum(axis=1), positives.counts).sum(axis=1)
        np.add.at(self._positives, positives.entries, 1)
        self._queries += len(top)

    def report(self) -> dict[str, Any]:
        """Return micro and macro F1@k x 100, and the measures x 100 of the sets at the threshold, if there is one.

        `depth`: number of best labels of a query that are compared with the threshold; `cut_off`: number of queries of
        which all these labels reach the threshold; `predictions`: mean number of labels in a set.
        """
        found = [self._averages(number) for number in range(len(self._found))]
        at_k = [*zip(self._ks, found, strict=False)]
        averages = {name: {f"F1@{k}": each[name]["F1"] for k, each in at_k} for name in ("micro", "macro")}
        if self._threshold is None:
            return {"averages": averages}
        predictions = float(self._found[-1, 1].sum() / max(1, self._queries))
        facts = {"score": self._threshold, "depth": self._ks[-1], "cut_off": self._cut_off, "predictions": predictions}
        return {"averages": averages, "at_threshold": {**facts, **found[-1]}}

    def _averages(self, number: int) -> dict[str, dict[str, float]]:
        hits, predictions = self._found[number].astype(np.int64)
        counts = np.stack([hits, predictions, self._positives])
        present = counts[:, (predictions > 0) | (self._positives > 0)]
        means = {
            "samples": self._of_queries[number] / max(1, self._queries),
            "micro": _measure(*counts.sum(axis=1)),
            "macro": _measure(*present).sum(axis=1) / max(1, present.shape[1]),
        }
        return {name: dict(zip(_MEASURES, (100 * values).tolist(), strict=True)) for name, values in means.items()}


def _measure(hits: np.ndarray, predicted: np.ndarray, positives: np.ndarray) -> np.ndarray:
    """Return precision, recall and F1, [3, ...], of counts of one shape."""
    above, below = np.array([hits, hits, 2 * hits]), np.array([predicted, positives, predicted + positives])
    return np.divide(above, below, out=np.zeros(below.shape), where=below > 0)
