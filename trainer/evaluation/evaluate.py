"""Scores a model on a split: exact search with filters, and all metrics with intervals and deciles."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.ragged import Ragged
from schemas.shard_files.parquet import filters_of, list_column
from schemas.shares import RowShare
from schemas.table import Table
from trainer.evaluation.breakdowns import Breakdowns, Deciles, Weakest, ZeroShot
from trainer.evaluation.metrics import Metrics, with_intervals
from trainer.evaluation.ranking import Ranking
from trainer.evaluation.split import LabelStatistics, label_statistics, open_split
from trainer.group import ALONE, Group, label_range
from trainer.input_kinds import InputKind
from trainer.inputs import Inputs, require_inputs, scored_columns
from trainer.methods.sections import Data
from trainer.model import Model

KS = (1, 3, 5, 10)


@dataclass
class SplitScores:
    """Results of scoring a split."""

    metrics: Metrics
    deciles: Deciles | None
    rows: int  # rows of the split that were read
    filtered: int  # pairs (query, label) that the filter removes
    weakest: Weakest
    zero_shot: ZeroShot | None
    breakdowns: Breakdowns
    ids: np.ndarray  # rows [n] of the table that have the queries in the metrics
    counted: np.ndarray  # places [n] of these queries among the rows that were read

    @property
    def queries(self) -> int:
        """Number of queries in the metrics: all rows, except rows without active labels if labels are retired."""
        return len(self.counted)

    def report(self, resamples: int = 1000) -> dict:
        """Return metrics x 100 with 95 % intervals, and further results.

        The further results are the deciles' contributions to P@k, recall per training frequency, metrics per part, the
        weakest queries and labels, and zero-shot metrics if measured.
        """
        report = {
            "queries": self.queries,
            "without_active_labels": self.rows - self.queries,
            "filter_pairs": self.filtered,
            **with_intervals(self.metrics, resamples),
            "deciles": None if self.deciles is None else self.deciles.result(),
            "weakest": self.weakest.report(),
            **self.breakdowns.report(self.metrics, self.ids),
        }
        return report if self.zero_shot is None else {**report, "zero_shot": self.zero_shot.report(resamples)}


@dataclass(frozen=True)
class SplitScorer:
    """Scores a model on one split of DATA.

    Each rank of `group` embeds a part of the queries, and scores all queries against the labels of the rank. All ranks
    get the same scores.
    """

    model: Model
    queries: Table
    labels: Table
    statistics: LabelStatistics
    group: Group
    ranking: Ranking
    share: RowShare

    @classmethod
    def open(
        cls,
        data: DataLayout,
        model: Model,
        split: str,
        group: Group = ALONE,
        ranking: Ranking | None = None,
        statistics: LabelStatistics | None = None,
        training_data: Data | None = None,
        window: str | Sequence[str] = "",
        queries: int | None = None,
    ) -> "SplitScorer":
        """Open a split. `ranking`: by default, the model's vectors. `statistics`: label statistics, if already read.

        `training_data`: the rows that the model was trained on, which determine the held-out rows. `window` and
        `queries`: as in `open_split`. Raises InputError for a missing split, or a split without the columns that the
        model reads; TableError if the split is damaged.
        """
        table, share = open_split(data, split, training_data or Data(), window, queries)
        require_inputs(table, model.inputs)
        labels, statistics = Table.open(data.labels, "labels"), statistics or label_statistics(data, training_data)
        return cls(model, table, labels, statistics, group, ranking or Ranking.of(model, group), share)

    @property
    def rows(self) -> int:
        """Number of queries of the split."""
        return self.share.rows(self.queries)

    def score(
        self,
        limit: int | None = None,
        on_rows: Callable[[int], None] | None = None,
        filter: bool = True,
        ks: Sequence[int] = (),
        seen_only: bool = False,
        zero_shot: bool = False,
        collect: Callable[[np.ndarray, np.ndarray, Ragged, Inputs], None] | None = None,
    ) -> SplitScores:
        """Score `limit` queries of all parts (by default all) at each k of KS and `ks`; `filter=False`: without filter.

        `seen_only`: labels without training points are not candidates. `zero_shot`: also report metrics for labels
        without training points. `collect` gets the best labels and their scores [B, K], the positives and the inputs of
        each batch of queries in the metrics. Raises InputError if `seen_only` and `zero_shot` are given, and for
        `zero_shot` if every label has training points.
        """
        frequency = self.statistics.frequency
        ks = sorted({*KS, *ks})
        unseen = ZeroShot(frequency, ks, self.statistics.candidates()) if zero_shot else None
        if zero_shot and seen_only:
            raise InputError("--seen-only leaves out zero-shot labels. Give only one of --zero-shot and --seen-only.")
        candidates = self.statistics.candidates(seen_only)
        metrics, weakest = Metrics(ks, self.statistics.inverse_propensity), Weakest()
        deciles = Deciles(frequency, ks) if frequency.sum() else None
        breakdowns = Breakdowns(self.queries, self.labels, frequency, ks)
        counters: list[Breakdowns | Deciles] = [breakdowns, *([] if deciles is None else [deciles])]
        counted = [np.zeros(0, np.int64)]
        seen = filtered = 0
        tokens = {"input_ids"} & {*self.queries.columns}
        columns = sorted({*scored_columns(self.queries, self.model.columns), *tokens})
        for rows in self.share.batches(self.queries, columns, limit):
            filters = filters_of(rows) if filter else Ragged.empty(rows.num_rows)
            filtered += len(filters.values)
            x, inputs = self._embed(rows), Inputs.of(rows.select(self.model.columns))
            scores, top = self.ranking.top_k(x, max(ks), filters, candidates, inputs)
            positives = list_column(rows, "label_ids")
            numbers = seen + np.arange(rows.num_rows)
            texts = _number(list_column(rows, "input_ids")) if tokens else None
            retired = self.statistics.retired
            if retired is not None:
                positives = positives.keep(~retired[positives.values])
            weakest.update(top, positives)
            if retired is not None:  # without active labels a query has no label to find
                labelled = np.flatnonzero(positives.counts)
                numbers, x, top, scores = numbers[labelled], x[labelled], top[labelled], scores[labelled]
                filters, positives = filters.take(labelled), positives.take(labelled)
                inputs, texts = inputs.take(labelled), texts[labelled] if texts is not None else None
            counted.append(numbers)
            if collect is not None:
                collect(top, scores, positives, inputs)
            metrics.update(top, positives, texts)
            for counter in counters:
                counter.update(top, positives)
            if unseen is not None:
                selected, unseen_positives = unseen.select(positives)
                unseen_search = x[selected], max(ks), filters.take(selected), unseen.labels, inputs.take(selected)
                _, top_unseen = self.ranking.top_k(*unseen_search)
                of_selected = texts[selected] if texts is not None else None
                unseen.update(top_unseen, top[selected], unseen_positives, of_selected)
            seen += rows.num_rows
            if on_rows is not None:
                on_rows(seen)
        counted_rows = np.concatenate(counted)
        ids = self.share.ids(self.queries, limit)[counted_rows]
        return SplitScores(metrics, deciles, seen, filtered, weakest, unseen, breakdowns, ids, counted_rows)

    def _embed(self, rows: pa.Table) -> torch.Tensor:
        group = self.group
        parts = [label_range(rows.num_rows, rank, group.ranks) for rank in range(group.ranks)]
        start, stop = parts[group.rank]
        part = self.model.embed_table(rows.slice(start, stop - start))
        return group.all_gather(part, [stop - start for start, stop in parts])


@dataclass(frozen=True, eq=False)
class PopularLabels:
    """Ranks labels by `frequency` [L], alike for every row; takes the places of a model and of its `Ranking`."""

    frequency: np.ndarray
    inputs: ClassVar[InputKind] = "none"
    columns: ClassVar[tuple[str, ...]] = ()

    def embed_table(self, rows: pa.Table) -> torch.Tensor:
        """Return no numbers for each row, [B, 0]."""
        return torch.zeros(rows.num_rows, 0)

    def top_k(
        self, x: torch.Tensor, k: int, filters: Ragged, candidates: np.ndarray | None = None, *_: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the same as `Ranking.top_k`."""
        labels = np.arange(len(self.frequency)) if candidates is None else candidates
        best = labels[np.argsort(-self.frequency[labels], kind="stable")[: k + filters.longest]]
        ranking = np.tile(best, (len(x), 1))
        ids, scores = filters.filter_ranking(ranking, self.frequency[ranking].astype(np.float64), k)
        return scores, ids


def measure_popularity(
    data: DataLayout,
    split: str,
    training_data: Data,
    queries: int,
    ks: Sequence[int] = (),
    window: str | Sequence[str] = "",
) -> dict[str, float]:
    """Return metrics of predicting the most frequent labels, on the first `queries` of `split` or of parts in `window`.

    Raises InputError if the split does not exist. Raises TableError.
    """
    statistics = label_statistics(data, training_data)
    popular: Any = PopularLabels(statistics.frequency)
    scorer = SplitScorer.open(data, popular, split, ALONE, popular, statistics, training_data, window, queries)
    return scorer.score(queries, ks=ks).metrics.result()


def _number(texts: Ragged) -> np.ndarray:
    """Return a number of each text, uint64 [B], by which equal texts are known."""
    rows = np.split(texts.entries, texts.offsets[1:-1] - texts.offsets[0])
    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
    return np.frombuffer(digests, "<u8")
