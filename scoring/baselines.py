"""Baselines on a split: TF-IDF, the linear ranker, popular labels."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from schemas import PAD
from schemas.layout import DataLayout
from schemas.ragged import Ragged
from scoring.linear import LinearRanker
from scoring.names import Names
from scoring.neighbours import Neighbours
from trainer.evaluation.evaluate import PopularLabels, SplitScorer, SplitScores
from trainer.evaluation.metrics import bootstrap
from trainer.group import ALONE
from trainer.inputs import Inputs
from trainer.methods.sections import Data

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
    was trained on. "gains": 95 % intervals of the model's metrics minus a baseline's, paired by query. Raises
    TableError.
    """
    report: dict[str, Any] = {"baselines": {}, "gains": {}}
    own = scores.metrics.contributions()
    for name, baseline in _baselines(data, training_data, scorer):
        scored = replace(scorer, model=baseline, ranking=baseline, group=ALONE).score(scores.rows, **choices).metrics
        report["baselines"][name] = scored.result()
        gains = {
            metric: part._replace(achieved=own[metric].achieved - part.achieved)
            for metric, part in scored.contributions().items()
        }
        intervals = bootstrap(gains, texts=scores.metrics.texts)
        report["gains"][name] = {metric: list(ends) for metric, ends in intervals.items()}
    return {**report, "beside_baselines": {"queries": scores.queries, "metrics": scores.metrics.result()}}


def _baselines(data: DataLayout, training_data: Data, scorer: SplitScorer) -> Iterator[tuple[str, Any]]:
    """Yield the name and the ranking of each baseline; only popular labels without tokens."""
    yield "popular labels", PopularLabels(scorer.statistics.frequency)
    if _TOKENS not in scorer.queries.columns:
        return
    rankers = {
        "nearest queries by TF-IDF": Neighbours.of(data, training_data, [_TOKENS]),
        "linear ranker": LinearRanker.of(data, training_data, [_TOKENS]),
        "labels' names in queries": Names.of_data(data, training_data),
    }
    for name, ranker in rankers.items():
        if ranker is not None:
            yield name, Baseline(ranker.rank, len(scorer.statistics.frequency), [_TOKENS])
