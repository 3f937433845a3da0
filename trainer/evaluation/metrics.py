"""P, R, F1, nDCG, PSP and PSnDCG at k: extreme classification (XC Repository, napkinXC) and subject indexing (Annif).

For a point with positives P_i and a ranking, best first, let hit_r be 1 if the label at rank r = 1, 2, ... is a
positive, else 0. Let q_l be the inverse propensity of label l, q_(r) the r-th greatest q_l of P_i, s_i <= k the number
of labels that are predicted up to rank k, and I_i(n) = sum_{r<=n} 1/log2(r+1), I_i = I_i(min(k, |P_i|)):

    P@k         mean_i  sum_{r<=k} hit_r / k                        also if fewer than k labels are predicted
    R@k         mean_i  sum_{r<=k} hit_r / |P_i|
    F1@k        mean_i  2 sum_{r<=k} hit_r / (s_i + |P_i|)          scikit-learn's f1_score, average="samples"
    nDCG@k      mean_i  sum_{r<=k} hit_r / log2(r+1) / I_i
    nDCG-all@k  mean_i  sum_{r<=k} hit_r / log2(r+1) / I_i(|P_i|)   trec_eval's ndcg of k results
    PSP@k       sum_i sum_{r<=k} hit_r q_r                 /  sum_i sum_{r<=k} q_(r)
    PSnDCG@k    sum_i sum_{r<=k} hit_r q_r / log2(r+1)/I_i /  sum_i sum_{r<=k} q_(r) / log2(r+1)/I_i

PSP and PSnDCG are ratios of sums over points, so a point is weighted by the greatest sum that the point can achieve. A
point without positives counts as 0 in every mean, and adds nothing to the sums of a ratio. Annif's F1@5 is F1@5, and
its NDCG of ten suggestions is nDCG-all@10, but Annif counts a point without positives as 1 in NDCG. The module
`scoring.label_sets` defines micro and macro F1@k, and precision, recall and F1 at a threshold.

Intervals come from the percentile bootstrap over distinct texts (Efron, 1979): points with one text are drawn together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from schemas import PAD
from schemas.errors import InputError, option
from schemas.ragged import Ragged, SparseRows, offsets_of, pad_columns
from schemas.randomness import Purpose, generator
from schemas.table import PartTable, Table
from trainer.methods.kinds import import_name
from trainer.methods.sections import METRICS


class Contributions(NamedTuple):
    """Contributions of N points to a metric, [N] float32, or to a family of metrics, [N, len(ks)].

    The metric is sum(achieved) / sum(achievable) or, without `achievable`, the mean of `achieved`.
    """

    achieved: np.ndarray
    achievable: np.ndarray | None = None


class Metrics:
    """Metrics at each of `ks`, streamed: update with batches of rankings, then read the result.

    `inverse_propensity`: [L] floating; if None, there are no propensity-scored metrics. Raises InputError for a k below
    1.
    """

    def __init__(self, ks: Sequence[int] = (1, 3, 5, 10), inverse_propensity: np.ndarray | None = None) -> None:
        self.ks = tuple(ks)
        if not self.ks or min(self.ks) < 1:
            raise InputError(f"metrics need at least one k, and every k must be at least 1; got {list(self.ks)}.")
        self._inverse_propensity = inverse_propensity
        self._batches: list[dict[str, Contributions]] = []
        self.texts: np.ndarray | None = None  # a number of each point's text, if known

    def update(self, top: np.ndarray, positives: Ragged, texts: np.ndarray | None = None) -> None:
        """Count one batch: `top` [B, K] int64 distinct label ids, best first, padded with -1; any K is allowed.

        `positives`: distinct label ids of B rows; `texts` [B]: a number of each row's text. Raises InputError for a
        repeated label and for a label id of L or more, ValueError for unequal rows.
        """
        weights = self._inverse_propensity
        if texts is not None:
            self.texts = texts if self.texts is None else np.append(self.texts, texts)
        rankings = Rankings(top[:, : max(self.ks)], positives, np.asarray(self.ks), weights)
        ordered = np.sort(rankings.top, axis=1)
        repeated = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
        if repeated.any():  # the label would count twice
            row = int(repeated.argmax())
            raise InputError(
                f"each label may be predicted only once per point, but row {row} of the batch repeats a label: "
                f"{rankings.top[row]}."
            )
        if weights is not None:
            refuse_unknown(rankings.top, positives.entries, len(weights))
        families: dict[str, Contributions | None] = {n: import_name(place)(rankings) for n, place in METRICS.items()}
        self._batches.append(
            {
                name: Contributions(*(column.astype(np.float32) for column in part if column is not None))
                for name, part in families.items()
                if part is not None
            }
        )

    def contributions(self) -> dict[str, Contributions]:
        """Return a dict from metric ("P@1", ...) to the contributions of all points [N] float32, in update order."""
        if not self._batches:
            raise InputError("no point was evaluated. Is the split empty?")
        joined: dict[str, Contributions] = {}
        for family in self._batches[0]:
            batches = zip(*(batch[family] for batch in self._batches), strict=True)
            columns = [np.concatenate(parts) for parts in batches if parts[0] is not None]
            for index, k in enumerate(self.ks):
                joined[f"{family}@{k}"] = Contributions(*(column[:, index] for column in columns))
        return joined

    def result(self, points: slice | np.ndarray = slice(None)) -> dict[str, float]:
        """Return a dict from metric ("P@1", "nDCG@5", ...) to the value x 100, over all points, a slice, or a mask [N].

        Raises InputError if no point was counted.
        """
        return {
            name: value(Contributions(*(column[points] for column in part if column is not None)))
            for name, part in self.contributions().items()
        }

    def report(self, resamples: int = 1000) -> dict[str, Any]:
        """Return metrics x 100, and the bounds of the 95 % intervals. Raises InputError if no point was counted."""
        ends = bootstrap(self.contributions(), resamples, texts=self.texts)
        return {"metrics": self.result(), "intervals": {name: list(pair) for name, pair in ends.items()}}

    def by_part(self, parts: Sequence[PartTable], rows: np.ndarray) -> dict[str, dict[str, float]]:
        """Return metrics x 100 of each part with points; `rows` [N]: the ids of the queries, in update order."""
        part_of = _part_of(rows, parts)
        return {
            part.name: {"queries": count, **self.result(part_of == number)}
            for number, part in enumerate(parts)
            if (count := int((part_of == number).sum()))
        }


def value(part: Contributions) -> float:
    """Compute a metric x 100 from contributions [N]; 0 if nothing is achievable."""
    achieved = float(part.achieved.sum(dtype=np.float64))
    achievable = len(part.achieved) if part.achievable is None else float(part.achievable.sum(dtype=np.float64))
    return 100 * achieved / achievable if achievable else 0.0


@dataclass(frozen=True, eq=False)
class Rankings:
    """Rankings of B points, passed to the functions in METRICS, which return contributions at each of `ks`.

    `top` [B, K]: distinct label ids, best first, padded with -1; `positives`: labels of each point; `ks` [k] int64;
    `inverse_propensity` [L], or None without propensity constants.
    """

    top: np.ndarray
    positives: Ragged
    ks: np.ndarray
    inverse_propensity: np.ndarray | None = None

    @property
    def depth(self) -> int:
        """The greatest k."""
        return int(self.ks.max())

    @cached_property
    def hits(self) -> np.ndarray:
        """1 if the label at a rank is a positive, else 0: [B, depth] float64."""
        return pad_columns(self.positives.contains(self.top), self.depth).astype(np.float64)

    @cached_property
    def attainable(self) -> np.ndarray:
        """|P_i|, at least 1, so that a point without positives divides nothing by 0, [B, 1]."""
        return np.maximum(self.positives.counts, 1)[:, None]

    @cached_property
    def ideal(self) -> np.ndarray:
        """I_i for each k, [B, len(ks)]."""
        return np.cumsum(discounts(self.depth))[np.minimum(self.attainable, self.ks) - 1]

    @cached_property
    def propensity_gains(self) -> tuple[np.ndarray, np.ndarray] | None:
        """q of each hit by rank, and q of positives, largest first, both [B, depth]; None without propensities."""
        weights = self.inverse_propensity
        if weights is None:
            return None
        gains, labels = self.hits * pad_columns(weights[np.maximum(self.top, 0)], self.depth), self.positives.entries
        rows = SparseRows(labels, weights[labels].astype(np.float64), offsets_of(self.positives.counts))
        best, _ = rows.best(self.depth)
        return gains, np.where(np.isneginf(best), 0, best)  # pads

    def up_to_k(self, gains: np.ndarray) -> np.ndarray:
        """Sum the gains [B, depth] over the ranks up to each k: [B, len(ks)]."""
        return np.cumsum(gains, axis=1)[:, self.ks - 1]


def discounts(ranks: int) -> np.ndarray:
    """Return 1 / log2(r + 1) of each rank r = 1, 2, ..., [ranks]."""
    return 1 / np.log2(np.arange(2, ranks + 2))


def precision(rankings: Rankings) -> Contributions:
    """Return the contributions to P@k."""
    return Contributions(rankings.up_to_k(rankings.hits) / rankings.ks)


def ndcg(rankings: Rankings) -> Contributions:
    """Return the contributions to nDCG@k."""
    return Contributions(rankings.up_to_k(rankings.hits * discounts(rankings.depth)) / rankings.ideal)


def ndcg_all(rankings: Rankings) -> Contributions:
    """Return the contributions to nDCG-all@k."""
    ideal = np.cumsum(discounts(rankings.attainable.max(initial=1)))[rankings.attainable - 1]
    return Contributions(rankings.up_to_k(rankings.hits * discounts(rankings.depth)) / ideal)


def recall(rankings: Rankings) -> Contributions:
    """Return the contributions to R@k."""
    return Contributions(rankings.up_to_k(rankings.hits) / rankings.attainable)


def f1(rankings: Rankings) -> Contributions:
    """Return the contributions to F1@k."""
    predicted = rankings.up_to_k(pad_columns(rankings.top != PAD, rankings.depth))
    return Contributions(2 * rankings.up_to_k(rankings.hits) / (predicted + rankings.attainable))


def psp(rankings: Rankings) -> Contributions | None:
    """Return the contributions to PSP@k; None without propensities."""
    gains = rankings.propensity_gains
    return None if gains is None else Contributions(*map(rankings.up_to_k, gains))


def psndcg(rankings: Rankings) -> Contributions | None:
    """Return the contributions to PSnDCG@k; None without propensities."""
    gains, discount = rankings.propensity_gains, discounts(rankings.depth)
    return gains and Contributions(*(rankings.up_to_k(each * discount) / rankings.ideal for each in gains))


def refuse_unknown(top: np.ndarray, positives: np.ndarray, labels: int) -> None:
    """Raise InputError if a predicted or true label id is outside [0, labels)."""
    greatest = max(int(top.max(initial=-1)), int(positives.max(initial=-1)))
    if greatest >= labels:
        raise InputError(
            f"label {greatest} has no training frequency: known labels are [0, {labels}). Evaluate with the labels "
            "table that the split was sharded with."
        )


_WEIGHTS = 1 << 22  # entries of one chunk of weights [S, N], 32 MiB


def paired_difference(
    ours: Sequence[Contributions], others: Sequence[Contributions], texts: np.ndarray | None = None
) -> tuple[float, float]:
    """Return by how much metrics x 100 of the same points differ, ours minus others, added up; and its standard error.

    Contributions [N] are paired by metric. Points with one of `texts` [N] (None: all differ) are one observation: their
    residuals are added up (linearisation, as in Taylor's series for a ratio of sums). Without points, both are 0.
    """
    total, residual = 0.0, np.zeros(len(ours[0].achieved))
    for own, other in zip(ours, others, strict=True):
        gain = own.achieved.astype(np.float64) - other.achieved
        below = np.ones(len(gain)) if own.achievable is None else own.achievable.astype(np.float64)
        whole = max(below.sum(), 1e-9)
        total += 100 * gain.sum() / whole
        residual += 100 * (gain - gain.sum() / whole * below) / whole
    by_text = residual if texts is None else np.bincount(np.unique(texts, return_inverse=True)[1], residual)
    return float(total), float(np.sqrt((by_text**2).sum() * len(by_text) / max(1, len(by_text) - 1)))


def bootstrap(
    contributions: Mapping[str, Contributions],
    resamples: int = 1000,
    texts: np.ndarray | None = None,
    part: np.ndarray | None = None,
) -> dict[str, tuple[float, float]]:
    """Return a dict from metric to the 95 % interval x 100: the 0.025 and 0.975 quantiles over resamples.

    `contributions`: [N] each, as `Metrics.contributions()` returns them. Each resample draws as many texts as there are
    distinct `texts` [N] (None: all differ), each with all its points, for all metrics; a quotient of sums is computed
    per resample. `part` [N] bool: intervals of the metric on these points minus the metric on the others. Intervals are
    the same on any machine. Raises InputError for no points.
    """
    points = len(next(iter(contributions.values())).achieved)
    if not points:
        raise InputError("no point was evaluated, so nothing can be resampled. Is the split empty?")
    ones = np.ones(points)
    columns = [(each.achieved, ones if each.achievable is None else each.achievable) for each in contributions.values()]
    parts = ones[:, None] if part is None else np.stack([part, ~part], axis=1)
    sums = parts[:, :, None, None] * np.array(columns, np.float64).transpose(2, 1, 0)[:, None]  # [N, parts, 2, metrics]
    if texts is not None:
        distinct, text_of = np.unique(texts, return_inverse=True)
        of_points, sums = sums, np.zeros((len(distinct), *sums.shape[1:]))
        np.add.at(sums, text_of, of_points)
    values, distinct_texts = np.empty((resamples, len(columns))), len(sums)
    chunk = max(1, _WEIGHTS // distinct_texts)
    for start in range(0, resamples, chunk):
        weights = np.empty((min(chunk, resamples - start), distinct_texts))  # how often a resample contains each text
        for row in range(len(weights)):
            # Each resample has its own counter-based generator, so results do not depend on the size of the chunks.
            draw = generator(0, Purpose.SAMPLE, 0, 0, start + row)
            weights[row] = np.bincount(draw.integers(distinct_texts, size=distinct_texts), minlength=distinct_texts)
        achieved, below = np.tensordot(weights, sums, 1).transpose(2, 1, 0, 3)
        # A resample in which nothing could be achieved counts as 0, as in the metric itself.
        found = np.divide(100 * achieved, below, out=np.zeros_like(below), where=below > 0)
        values[start : start + len(weights)] = found[0] - found[1:].sum(0)
    ends = np.quantile(values, [(1 - 0.95) / 2, (1 + 0.95) / 2], axis=0)
    return {name: (float(low), float(high)) for name, low, high in zip(contributions, *ends, strict=True)}


class LabelGroups:
    """Positives, and hits by rank, in each group of labels, streamed like `Metrics`.

    `group_of` [L]: the group of each label; `names`: the names of the groups.
    """

    def __init__(self, group_of: np.ndarray, names: Sequence[str], ks: Sequence[int] = (1, 3, 5, 10)) -> None:
        self._group_of, self._names, self._ks = group_of, names, ks
        self._positives, self._hits = np.zeros(len(names), np.int64), np.zeros((max(ks), len(names)), np.int64)

    def update(self, top: np.ndarray, positives: Ragged) -> None:
        """Count one batch: `top` [B, K] label ids, best first, padded with -1; `positives`: label ids of B rows.

        Raises InputError for a label id of L or more, ValueError for unequal rows.
        """
        top = top[:, : len(self._hits)]
        refuse_unknown(top, positives.entries, len(self._group_of))
        row, rank = np.nonzero(positives.contains(top))
        np.add.at(self._hits, (rank, self._group_of[top[row, rank]]), 1)
        self._positives += np.bincount(self._group_of[positives.entries], minlength=len(self._positives))

    def recall(self) -> dict[str, dict[str, float]]:
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


def label_groups(labels: Table, frequency: np.ndarray, ks: Sequence[int]) -> dict[str, LabelGroups]:
    """Return groups by training frequency [L], and by part of `labels` if there are several, by name in a report."""
    names = ("0", "1", "2-3", "4-10", "more than 10")
    groups = {"labels_by_frequency": LabelGroups(np.searchsorted([0, 1, 3, 10], frequency), names, ks)}
    if len(labels.parts) > 1:
        part_of = _part_of(np.arange(len(frequency)), labels.parts)
        groups["labels_by_part"] = LabelGroups(part_of, [part.name for part in labels.parts], ks)
    return groups


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
            raise InputError(f"{option('zero_shot', True)}: every label has training points. Leave the option out.")
        self._alone, self._among_all = Metrics(ks), Metrics(ks)
        self._queries = 0

    def update(
        self, top: np.ndarray, positives: Ragged, texts: np.ndarray | None, rank: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Count one batch, like `Metrics.update`; `rank(rows)` returns the best of `labels` for `rows` [n], [n, K]."""
        unseen = positives.keep(self._unseen[positives.values])
        rows = np.flatnonzero(unseen.counts)
        unseen, texts = unseen.take(rows), None if texts is None else texts[rows]
        self._queries += len(rows)
        self._alone.update(rank(rows), unseen, texts)
        self._among_all.update(top[rows], unseen, texts)

    def report(self, resamples: int = 1000) -> dict[str, Any]:
        """Return metrics x 100 with intervals, for both rankings; no metrics if no query has a zero-shot positive."""
        report: dict[str, Any] = {"labels": len(self.labels), "queries": self._queries}
        if self._queries:
            report |= {"alone": self._alone.report(resamples), "among_all": self._among_all.report(resamples)}
        return report


DEPTH = 5  # number of top ranks in which positives are counted
QUERIES = 100  # number of queries shown; many queries may have the same text


class Weakest:
    """Counts of positives among the best DEPTH labels of each query."""

    def __init__(self) -> None:
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []  # hits and positives of each query [B]

    def update(self, top: np.ndarray, positives: Ragged) -> None:
        """Count one batch: `top` [B, K] label ids, best first, padded with -1; `positives`: label ids of B rows."""
        self._batches.append((positives.contains(top[:, :DEPTH]).sum(1), positives.counts))

    def report(self) -> dict[str, Any]:
        """Return {"k", "queries": [row, found, positives]}, the lowest fraction of attainable positives found first.

        Ties are sorted by the number of positives, largest first. Queries with all attainable positives are left out.
        """
        hits, positives = map(np.concatenate, zip(*self._batches, strict=True))
        attainable = np.minimum(positives, DEPTH)
        rows = np.flatnonzero(hits < attainable)
        order = rows[np.lexsort((rows, -positives[rows], hits[rows] / attainable[rows]))][:QUERIES]
        return {"k": DEPTH, "queries": np.stack([order, hits[order], positives[order]], 1).tolist()}
