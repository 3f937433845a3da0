"""Scoring of a model on a split: exact search, filters applied, every metric with its interval and deciles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from schemas.errors import InputError, TableError
from schemas.layout import DataLayout
from schemas.ragged import Ragged
from schemas.shard_files.parquet import filters_of, list_column
from schemas.table import Table
from trainer.config import Train
from trainer.evaluation.by_part import Bounds, ByPart
from trainer.evaluation.deciles import Deciles
from trainer.evaluation.frequencies import count_points
from trainer.evaluation.fusion.ranking import Ranking
from trainer.evaluation.held_out import open_split
from trainer.evaluation.intervals import with_intervals
from trainer.evaluation.metrics import Metrics
from trainer.evaluation.propensity import inverse_propensity
from trainer.evaluation.retired import retired_labels
from trainer.evaluation.weakest import Weakest
from trainer.evaluation.zero_shot import ZeroShot
from trainer.group import ALONE, Group, label_range
from trainer.inputs import require_inputs, scored_columns
from trainer.methods.sections import Data
from trainer.model import Model
from trainer.stream.sources import ALL_ROWS, RowShare

KS = (1, 3, 5, 10)


@dataclass(frozen=True)
class LabelStatistics:
    """`frequency` [L] training points of each label; `inverse_propensity` [L], None where A and B are not stated.

    `retired` [L] bool: labels that are no candidates; None: there is none. `trained`: the model was trained without the
    labels from it on, and they are none either.
    """

    frequency: np.ndarray
    inverse_propensity: np.ndarray | None
    retired: np.ndarray | None = None
    trained: int | None = None

    def candidates(self, seen_only: bool = False) -> np.ndarray | None:
        """Return the labels [C] that may be predicted, ascending; None: all. `seen_only`: with training points."""
        if self.retired is None and self.trained is None:
            return np.flatnonzero(self.frequency) if seen_only else None
        kept = np.ones(len(self.frequency), bool) if self.retired is None else ~self.retired
        if seen_only:
            kept = kept & (self.frequency > 0)
        return np.flatnonzero(kept[: self.trained])


def label_statistics(data: DataLayout, trained: Data | None = None) -> LabelStatistics:
    """Read frequencies from the labels table, A and B from the data's manifest: never guessed.

    Of a run that is `trained` on a window of parts, frequencies and propensities are those of the window. Raises
    InputError: no such part; TableError.
    """
    labels = Table.open(data.labels, "labels")
    points: Any
    if trained is not None and trained.parts:
        window = count_points(data, trained, labels.rows)
        frequency, points = window
    else:
        groups = [group.column("frequency").to_numpy() for group in labels.batches(["frequency"])]
        frequency = np.concatenate(groups) if groups else np.empty(0, np.int64)
        points = labels.parameters.get("training_points")
    retired = retired_labels(data)
    propensity = Table.open(data.root, "data").parameters.get("propensity")
    if propensity is None:
        return LabelStatistics(frequency, None, retired)
    try:
        points = int(points)
        a, b = float(propensity["a"]), float(propensity["b"])
    except (KeyError, TypeError, ValueError) as error:
        raise TableError(
            f"{data.root}: its propensity constants cannot be read: {error}. Shard the data again."
        ) from None
    return LabelStatistics(frequency, inverse_propensity(frequency, points, a, b), retired)


def positive_weights(
    data: DataLayout, options: Train, say: Callable[[str], None], trained: Data | None = None
) -> np.ndarray | None:
    """Return positive_ratio x q_l ** positive_weight, [L] float32, by the rows `trained` on; None: all 1.

    q's part has mean 1 over training pairs. Without A and B in the data it is left out, and `say` is told: they are
    never guessed.
    """
    if options.positive_weight:
        statistics = label_statistics(data, trained)
        if statistics.inverse_propensity is not None:
            weight = statistics.inverse_propensity**options.positive_weight
            mean = np.average(weight, weights=statistics.frequency)
            return (options.positive_ratio * weight / mean).astype(np.float32)
        say(
            f"{data.root} does not state its propensity constants: positives weigh the same "
            "(extremis shard --propensity A,B states them; train.positive_weight = 0 silences this)"
        )
    if options.positive_ratio == 1:
        return None
    labels = Table.open(data.labels, "labels").rows
    return np.full(labels, options.positive_ratio, np.float32)


@dataclass
class Scores:
    """Results of scoring a split."""

    metrics: Metrics
    deciles: Deciles | None
    queries: int
    filtered: int  # pairs (query, label) of the filter
    weakest: Weakest
    zero_shot: ZeroShot | None = None
    by_part: ByPart | None = None
    counted: np.ndarray | None = None  # rows [n] of the queries that metrics are over; None: all

    def report(self, resamples: int = 1000) -> dict:
        """Return metrics x 100, their 95 % intervals, the deciles' parts of P@k, the weakest queries and labels, and
        zero-shot labels if measured.
        """
        report = {
            "queries": self.queries,
            "filter_pairs": self.filtered,
            **with_intervals(self.metrics, resamples),
            "deciles": None if self.deciles is None else self.deciles.result(),
            "weakest": self.weakest.report(),
        }
        if self.by_part is not None:
            report |= self.by_part.report()
        return report if self.zero_shot is None else {**report, "zero_shot": self.zero_shot.report(resamples)}


@dataclass(frozen=True)
class Scorer:
    """A model against one split of DATA.

    Each rank of `group` embeds a part of the queries and scores all against its labels; all get the same scores.
    """

    model: Model
    queries: Table
    statistics: LabelStatistics
    group: Group = ALONE
    ranking: Ranking | None = None
    part: RowShare = ALL_ROWS
    labels: Table | None = None  # of the labels' table, for metrics by part of a version

    @classmethod
    def open(
        cls,
        data: DataLayout,
        model: Model,
        split: str,
        group: Group = ALONE,
        ranking: Ranking | None = None,
        statistics: LabelStatistics | None = None,
        trained: Data | None = None,
    ) -> "Scorer":
        """Open a split. `ranking`: by default by the model's vectors; `statistics`: where they are read already.

        `trained`: the rows that the model was trained on, for those left out.
        Raises InputError for no such split, or one without the columns that the model reads; TableError when damaged.
        """
        queries, part = open_split(data, split, trained or Data())
        require_inputs(queries, model.inputs)
        labels = Table.open(data.labels, "labels")
        return cls(model, queries, statistics or label_statistics(data, trained), group, ranking, part, labels)

    @property
    def rows(self) -> int:
        """Queries of the split."""
        return self.part.rows(self.queries.rows)

    def score(
        self,
        limit: int | None = None,
        on_rows: Callable[[int], None] | None = None,
        filter: bool = True,
        ks: Sequence[int] = (),
        seen_only: bool = False,
        zero_shot: bool = False,
    ) -> Scores:
        """Measure the first `limit` queries (all by default) at KS and `ks`; `filter=False` applies no filter.

        `seen_only`: labels without a training point are no candidates. `zero_shot`: they are reported separately.
        Raises InputError for both at once, and where every label has a training point.
        """
        frequency = self.statistics.frequency
        ks = sorted({*KS, *ks})
        unseen = ZeroShot(frequency, ks, self.statistics.candidates()) if zero_shot else None
        if zero_shot and seen_only:
            raise InputError("zero-shot labels are no candidates among the seen only: ask for one of the two.")
        among = self.statistics.candidates(seen_only)
        metrics, weakest = Metrics(ks, self.statistics.inverse_propensity), Weakest()
        ranking = self.ranking or Ranking.of(self.model, self.group)
        deciles = Deciles(frequency, ks) if frequency.sum() else None
        by_part = None
        if self.labels is not None and self.labels.parts:
            bounds = (Bounds.of(self.queries), Bounds.of(self.labels))
            by_part = ByPart(*bounds, ks, self.statistics.inverse_propensity)
        first, _ = self.part.range(self.queries.rows)
        counted = [np.zeros(0, np.int64)]
        seen = filtered = 0
        columns = scored_columns(self.queries, self.model.columns)
        for group in self.part.batches(self.queries, columns):
            rows = group if limit is None else group.slice(0, max(0, limit - seen))
            if rows.num_rows == 0:
                break
            filters = filters_of(rows) if filter else Ragged.empty(rows.num_rows)
            filtered += len(filters.values)
            x = self._embed(rows)
            _, top = ranking.top_k(x, max(ks), filters, among)
            positives = list_column(rows, "label_ids")
            numbers = first + seen + np.arange(rows.num_rows)
            retired = self.statistics.retired
            if retired is not None:
                positives = positives.keep(~retired[positives.values])
            weakest.update(top, positives)
            if retired is not None:  # a query whose labels are all retired has none to find
                labelled = np.flatnonzero(positives.counts)
                numbers, x, top = numbers[labelled], x[labelled], top[labelled]
                filters, positives = filters.take(labelled), positives.take(labelled)
            counted.append(numbers - first)
            metrics.update(top, positives)
            if deciles is not None:
                deciles.update(top, positives)
            if by_part is not None:
                by_part.update(numbers, top, positives)
            if unseen is not None:
                selected, unseen_positives = unseen.select(positives)
                _, top_unseen = ranking.top_k(x[selected], max(ks), filters.take(selected), unseen.labels)
                unseen.update(top_unseen, top[selected], unseen_positives)
            seen += rows.num_rows
            if on_rows is not None:
                on_rows(seen)
        return Scores(metrics, deciles, seen, filtered, weakest, unseen, by_part, np.concatenate(counted))

    def _embed(self, rows: pa.Table) -> torch.Tensor:
        group = self.group
        parts = [label_range(rows.num_rows, rank, group.ranks) for rank in range(group.ranks)]
        start, stop = parts[group.rank]
        part = self.model.embed_table(rows.slice(start, stop - start))
        return group.gather(part, [stop - start for start, stop in parts])
