"""Precision, recall and F1 of sets of predicted labels: of each label, per query, micro and macro, as in scikit-learn.

The set of a query is its first k labels, or the labels that a decision gives. For h hits among p predicted labels and n
positives, precision is h / p, recall is h / n, and F1 is 2 h / (p + n); 0 / 0 counts as 0.

    samples  mean over queries of the value of a query; F1 is F1@k of `trainer.evaluation.metrics`
    micro    value of h, p and n summed over all queries
    macro    mean of the value of a label over the labels that are a positive or predicted at least once

The names are those of `precision_recall_fscore_support`, which takes its macro mean over the labels in its arguments:
macro F1 is the mean of the labels' F1, not the F1 of mean precision and mean recall.
"""

from collections.abc import Collection
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from schemas import PAD
from schemas.ragged import Ragged, is_first_key, offsets_of
from trainer.evaluation.metrics import refuse_unknown
from trainer.inputs import Inputs

_MEASURES = "precision", "recall", "F1"
CONFUSED = 3  # labels that a label is confused with, at most
_WRONG = 10  # best incorrect labels of a query that count as given instead of its missed ones


class _Rankings(NamedTuple):
    top: np.ndarray  # [N, K]
    scores: np.ndarray  # [N, K]
    hits: np.ndarray  # bool [N, K]
    positives: Ragged  # N rows


class LabelSets:
    """Rankings of N queries of a split among L `labels`, and the figures of sets that are chosen from them.

    Takes 9 bytes for each label of a ranking.
    """

    def __init__(self, labels: int) -> None:
        self._labels = labels
        self._batches: list[_Rankings] = []

    def collect(self, top: np.ndarray, scores: np.ndarray, positives: Ragged, inputs: Inputs | None = None) -> None:
        """Add one batch: `top` [B, K] label ids, best first, padded with -1, and their `scores` [B, K].

        Raises InputError for a label id of L or more.
        """
        refuse_unknown(top, positives.entries, self._labels)
        narrow = top.astype(np.int32), scores.astype(np.float32)
        self._batches.append(_Rankings(*narrow, positives.contains(top), positives))

    @cached_property
    def rankings(self) -> _Rankings:
        """All batches, as one; none may follow."""
        top, scores, hits, positives = zip(*self._batches, strict=True)
        self._batches.clear()
        return _Rankings(np.concatenate(top), np.concatenate(scores), np.concatenate(hits), Ragged.join(positives))

    def at_k(self, ks: Collection[int]) -> dict[str, dict[str, float]]:
        """Return micro and macro F1@k x 100."""
        top, found = self.rankings.top, {}
        for k in sorted(ks):
            found[k] = self.averages((top != PAD) & (np.arange(top.shape[1]) < k))
        return {name: {f"F1@{k}": each[name]["F1"] for k, each in found.items()} for name in ("micro", "macro")}

    def averages(self, given: np.ndarray) -> dict[str, Any]:
        """Return the measures x 100 of the sets `given` [N, K] bool, by kind of mean, and the mean size of a set."""
        counts = self._counts(given)
        present = counts[:, counts[1:].any(axis=0)]
        hits, sizes = (given & self.rankings.hits).sum(axis=1), given.sum(axis=1)
        means = {
            "samples": _measure(hits, sizes, self.rankings.positives.counts).mean(axis=1),
            "micro": _measure(*counts.sum(axis=1)),
            "macro": _measure(*present).sum(axis=1) / max(1, present.shape[1]),
        }
        named = {name: dict(zip(_MEASURES, (100 * of).tolist(), strict=True)) for name, of in means.items()}
        return {"predictions": float(sizes.mean()), **named}

    def _counts(self, given: np.ndarray) -> np.ndarray:
        """Return the hits, predictions and positives of each label, int64 [3, L]."""
        top, _, is_hit, positives = self.rankings
        counted = top[given & is_hit], top[given], positives.entries
        return np.stack([np.bincount(ids, minlength=self._labels) for ids in counted])

    def of_labels(self, given: np.ndarray) -> dict[str, pa.Array]:
        """Return columns [L], figures x 100 of each label under the sets `given` [N, K] bool.

        `found`: positives that are given. `average_precision` and `median_rank` are null without positives. A positive
        that is not among the K labels of a ranking adds nothing to `average_precision`, which equals scikit-learn's if
        rankings are complete, and has the rank infinity. `missed_for`: labels given incorrectly for most of the queries
        that miss the label; `given_for`: labels that are missed by most of the queries for which the label is given
        incorrectly; both with the numbers of these queries. `missed`, `wrong`: a query [0, N) that misses the label, at
        the lowest rank, and one for which it is given incorrectly, with the highest score.
        """
        top, scores, is_hit, positives = self.rankings
        counts, rows, ids = self._counts(given), positives.row_of(), positives.entries.astype(np.int64)
        ranks, was_given = self._ranks(given, rows, ids)
        wrong = given & ~is_hit
        wrong_rows, places = np.nonzero(wrong)
        worst = top[wrong_rows, places], -scores[wrong_rows, places], wrong_rows
        wrong &= np.cumsum(wrong, axis=1) <= _WRONG
        given_wrong = Ragged.from_counts(top[wrong].astype(np.int64), wrong.sum(axis=1))
        instead = given_wrong.take(rows[~was_given])  # of each missed positive
        pairs = ids[~was_given].repeat(instead.counts), instead.entries
        columns: dict[str, Any] = {"support": counts[2], "predicted": counts[1], "found": counts[0]}
        columns |= zip(_MEASURES, 100 * _measure(*counts), strict=True)
        columns |= {"average_precision": 100 * self._average_precision(counts[2])}
        columns |= {"median_rank": _medians(ids, ranks, counts[2])}
        columns = {name: pa.array(column, from_pandas=True) for name, column in columns.items()}  # null for NaN
        for name, confused in {"missed_for": pairs, "given_for": pairs[::-1]}.items():
            queries, labels = self._most(*confused)
            offsets = pa.array(offsets_of((labels != PAD).sum(axis=1)).astype(np.int32))
            columns[name] = pa.ListArray.from_arrays(offsets, labels[labels != PAD])
            columns[f"{name}_queries"] = pa.ListArray.from_arrays(offsets, queries[labels != PAD].astype(np.int32))
        for name, errors in {"missed": (ids[~was_given], -ranks[~was_given], rows[~was_given]), "wrong": worst}.items():
            first = self._first(*errors)
            columns[name] = pa.array(first, mask=first == PAD)
        return columns

    def _ranks(self, given: np.ndarray, rows: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rank [V], from 1, of each positive `ids` [V] of `rows` [V], else infinity; and if it is given."""
        row, place = np.nonzero(self.rankings.hits)
        keys = row * self._labels + self.rankings.top[row, place]
        order = np.argsort(keys)
        found = np.searchsorted(keys, rows * self._labels + ids, sorter=order)
        ranks, was_given = np.full(len(ids), np.inf), np.zeros(len(ids), bool)
        if len(keys):
            found = order[np.minimum(found, len(keys) - 1)]
            is_ranked = keys[found] == rows * self._labels + ids
            ranks[is_ranked] = 1 + place[found[is_ranked]]
            was_given[is_ranked] = given[row, place][found[is_ranked]]
        return ranks, was_given

    def _average_precision(self, support: np.ndarray) -> np.ndarray:
        """Return the average precision of each label, [L], NaN without positives; equal scores count together."""
        kept = (self.rankings.top != PAD) & (support[self.rankings.top] > 0)
        labels, scores, hits = (column[kept] for column in self.rankings[:3])
        # Label, score and hit form one number: to sort numbers takes a tenth of the time of np.lexsort.
        bits = (scores + np.float32(0)).view(np.int32).astype(np.int64)  # 0 instead of -0
        bits ^= np.where(bits < 0, 0x7FFFFFFF, 0)  # in the order of the scores
        keys = np.sort((labels.astype(np.int64) << 33) + ((0x7FFFFFFF - bits) << 1) + hits)
        found = np.flatnonzero(keys & 1)
        of, end = keys[found] >> 33, np.searchsorted(keys, keys[found], side="right")  # after equal scores
        start = np.searchsorted(keys, of << 33)
        precision = (np.searchsorted(found, end) - np.searchsorted(found, start)) / (end - start)
        sums = np.bincount(of, precision, self._labels)
        return np.divide(sums, support, out=np.full(self._labels, np.nan), where=support > 0)

    def _most(self, own: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the counts and ids, [L, CONFUSED], of the most frequent `others` [n] of each label in `own` [n]."""
        keys, counts = np.unique(own * self._labels + others, return_counts=True)
        own = keys // self._labels
        order = np.argsort(own * (1 + counts.max(initial=0)) - counts, kind="stable")  # keys are almost in this order
        place = np.arange(len(own)) - offsets_of(np.bincount(own, minlength=self._labels))[own]
        order, own, place = (column[place < CONFUSED] for column in (order, own, place))
        most, queries = np.full((2, self._labels, CONFUSED), PAD)
        most[own, place], queries[own, place] = keys[order] % self._labels, counts[order]
        return queries, most

    def _first(self, ids: np.ndarray, order: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the row with the smallest `order` of each label, int64 [L], -1 without one; arguments [n]."""
        by_label = np.lexsort((rows, order, ids))
        ids, first = ids[by_label], np.full(self._labels, PAD, np.int64)
        starts = is_first_key(ids)
        first[ids[starts]] = rows[by_label][starts]
        return first


def _medians(ids: np.ndarray, ranks: np.ndarray, support: np.ndarray) -> np.ndarray:
    """Return the median of the `ranks` [V] of each label in `ids` [V], [L]; NaN without positives."""
    ranked, starts = ranks[np.lexsort((ranks, ids))], offsets_of(support)[:-1]
    medians, present = np.full(len(support), np.nan), support > 0
    middle = [(starts + (support - odd) // 2)[present] for odd in (1, 0)]
    medians[present] = (ranked[middle[0]] + ranked[middle[1]]) / 2
    return medians


def _measure(hits: np.ndarray, predicted: np.ndarray, positives: np.ndarray) -> np.ndarray:
    """Return precision, recall and F1, [3, ...], of counts of one shape."""
    above, below = np.array([hits, hits, 2 * hits]), np.array([predicted, positives, predicted + positives])
    return np.divide(above, below, out=np.zeros(below.shape), where=below > 0)
