"""Baselines that a model should outperform, scored on the same queries and candidates as the model."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from schemas import PAD
from schemas.layout import DataLayout
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column
from schemas.shares import ALL_ROWS
from trainer.evaluation.evaluate import PopularLabels, SplitScorer, SplitScores
from trainer.evaluation.metrics import bootstrap
from trainer.group import ALONE
from trainer.inputs import Inputs
from trainer.linear.ranker import LinearRanker
from trainer.methods.sections import Data
from trainer.model import DataSizes
from trainer.stream import open_queries

TEXTS = 100_000  # maximum number of training points that a query is compared with
_TOKENS = "input_ids"


@dataclass(frozen=True, eq=False)
class Baseline:
    """Ranks `labels` labels without a model; takes the places of a model and of its `Ranking` in a `SplitScorer`.

    `rank`: inputs of B rows, k -> (scores [B, k], label ids [B, k] best first, padded with -1). `columns`: the columns
    that `rank` reads.
    """

    rank: Callable[[Inputs, int], tuple[np.ndarray, np.ndarray]]
    labels: int
    columns: Sequence[str]

    def embed_table(self, rows: pa.Table) -> torch.Tensor:
        """Return no numbers for each row, [B, 0]: `rank` reads the rows' inputs."""
        return torch.zeros(rows.num_rows, 0)

    def top_k(
        self, x: torch.Tensor, k: int, filters: Ragged, candidates: np.ndarray | None, inputs: Inputs
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the same as `Ranking.top_k`."""
        left_out = 0 if candidates is None else self.labels - len(candidates)
        scores, ids = self.rank(inputs, min(self.labels, k + filters.longest + left_out))
        if candidates is not None:
            ids = np.where(np.isin(ids, candidates), ids, PAD)
        ids, scores = filters.filter_ranking(ids, scores, k)
        return scores, ids


def compare_baselines(
    data: DataLayout, training_data: Data, scorer: SplitScorer, scores: SplitScores, **choices: Any
) -> dict[str, Any]:
    """Return the metrics of each baseline on the queries that the model was scored on.

    `scorer` gave `scores` with the arguments `choices` of `SplitScorer.score`; `training_data`: the rows that the model
    was trained on. "gains": 95 % intervals of the model's metrics minus a baseline's, paired by query; "choices":
    settings of baselines. Raises TableError.
    """
    report: dict[str, Any] = {"baselines": {}, "gains": {}, "choices": {}}
    own = scores.metrics.contributions()
    for name, baseline, choice in _baselines(data, training_data, scorer):
        scored = replace(scorer, model=baseline, ranking=baseline, group=ALONE).score(scores.rows, **choices).metrics
        report["baselines"][name] = scored.result()
        report["choices"] |= {name: choice} if choice else {}
        gains = {
            metric: part._replace(achieved=own[metric].achieved - part.achieved)
            for metric, part in scored.contributions().items()
        }
        intervals = bootstrap(gains, texts=scores.metrics.texts)
        report["gains"][name] = {metric: list(ends) for metric, ends in intervals.items()}
    return {**report, "beside_baselines": {"queries": scores.queries, "metrics": scores.metrics.result()}}


def _baselines(data: DataLayout, training_data: Data, scorer: SplitScorer) -> Iterator[tuple[str, Any, dict]]:
    """Yield the most frequent labels and, if rows have tokens, the labels of similar texts and a linear ranker's.

    Each has a name, and the settings that were chosen on the training points.
    """
    from trainer.evaluation.tfidf import NearestTexts  # imports SciPy, which a trainer does not load

    yield "popular labels", PopularLabels(scorer.statistics.frequency), {}
    if _TOKENS not in scorer.queries.columns:
        return
    vocabulary, labels = DataSizes.of(data).vocabulary, len(scorer.statistics.frequency)
    trained_on = open_queries(data, training_data.split)
    points = list(training_data.training_rows.batches(trained_on, [_TOKENS, "label_ids"], TEXTS))
    nearest = NearestTexts.chosen(_joined(points, _TOKENS), _joined(points, "label_ids"), vocabulary)
    choice = {name: getattr(nearest, name) for name in ("ngrams", "neighbours", "temperature")}
    yield "nearest queries by TF-IDF", Baseline(nearest.rank, labels, [_TOKENS]), choice
    words = LinearRanker.of(data, training_data, [_TOKENS])
    if words is not None:
        yield "linear ranker", Baseline(words.rank, labels, [_TOKENS]), {}
    texts = _joined(ALL_ROWS.batches(scorer.labels, [_TOKENS], TEXTS), _TOKENS)
    own = Ragged.from_matrix(ALL_ROWS.ids(scorer.labels, TEXTS)[:, None])  # each text has its own label
    if len(texts.entries):
        by_texts = Baseline(NearestTexts.of(texts, own, vocabulary).rank, labels, [_TOKENS])
        yield "nearest label texts by TF-IDF", by_texts, {}


def _joined(groups: Iterable[pa.Table], column: str) -> Ragged:
    return Ragged.join(list_column(group, column) for group in groups)
