"""Baselines on a split: TF-IDF, the linear ranker, popular labels."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import scipy.sparse
import torch

from schemas import PAD
from schemas.layout import DataLayout
from schemas.ragged import Ragged, SparseRows
from schemas.shard_files.parquet import list_column
from schemas.shares import ALL_ROWS
from scoring.linear import LinearRanker
from scoring.memory import NEIGHBOURS, TEMPERATURE, count_votes
from search.torch_topk import top_of_block
from trainer.encoders.bag import PAIR_BUCKETS, count_ngrams, inverse_document_frequency, normalize_rows, scale_features
from trainer.evaluation.evaluate import PopularLabels, SplitScorer, SplitScores
from trainer.evaluation.metrics import Metrics, bootstrap
from trainer.group import ALONE
from trainer.inputs import Inputs
from trainer.methods.sections import Data
from trainer.model import DataSizes
from trainer.stream import open_queries

_BATCH = 200  # number of queries compared at a time
_TRIED = [*itertools.product((10, 30, 100), (0.05, 0.1, 0.2, 0.5))]  # numbers of neighbours, and temperatures
_SAMPLE = 1000  # number of texts to choose by


@dataclass(frozen=True, eq=False)
class NearestTexts:
    """Finds the nearest of `texts` [V, n] by cosine of TF-IDF vectors; the nearest texts vote for their `labels`.

    Features are `vocabulary` words and, with `ngrams` = 2, pairs of words. `factors` [V]: inverse document frequencies.
    The nearest `neighbours` texts vote, as in `count_votes`.
    """

    vocabulary: int
    ngrams: int
    factors: np.ndarray
    texts: scipy.sparse.csr_matrix
    labels: Ragged
    neighbours: int = NEIGHBOURS
    temperature: float = TEMPERATURE

    @classmethod
    def of(cls, texts: Ragged, labels: Ragged, vocabulary: int, ngrams: int = 2) -> "NearestTexts":
        """Build the index from `texts` of token ids, and the `labels` of each text."""
        counted = count_ngrams(texts, ngrams=ngrams, vocabulary=vocabulary, buckets=PAIR_BUCKETS)
        frequency = np.bincount(counted.ids, minlength=vocabulary + PAIR_BUCKETS)
        factors = inverse_document_frequency(frequency, texts.rows)
        return cls(vocabulary, ngrams, factors, _weigh(counted, factors).T.tocsr(), labels)

    @classmethod
    def chosen(cls, texts: Ragged, labels: Ragged, vocabulary: int) -> "NearestTexts":
        """Build the index that ranks the labels of a sample of its own texts best, each by the other texts: nDCG@5."""
        sample = np.linspace(0, texts.rows - 1, min(_SAMPLE, texts.rows)).astype(np.int64)
        best, chosen = -1.0, cls.of(texts, labels, vocabulary)
        for ngrams in (1, 2):
            index = cls.of(texts, labels, vocabulary, ngrams)
            cosine, rows = index._nearest(texts.take(sample), max(width for width, _ in _TRIED) + 1)
            rows = np.where(rows == sample[:, None], PAD, rows)
            for width, temperature in _TRIED:
                votes = count_votes(cosine[:, : width + 1], rows[:, : width + 1], labels, temperature)
                metrics = Metrics((5,))
                metrics.update(votes.best(5)[1], labels.take(sample))
                if (found := metrics.result()["nDCG@5"]) > best:
                    best, chosen = found, replace(index, neighbours=width, temperature=temperature)
        return chosen

    def rank(self, inputs: Inputs, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores [B, k], label ids [B, k] best first, padded with -1) for the tokens of B texts."""
        cosine, rows = self._nearest(inputs.tokens or Ragged.empty(0), self.neighbours)
        return count_votes(cosine, rows, self.labels, self.temperature).best(k)

    def _nearest(self, texts: Ragged, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosines and rows [B, width] of the nearest texts that share a word, best first, padded with -1."""
        counted = count_ngrams(texts, ngrams=self.ngrams, vocabulary=self.vocabulary, buckets=PAIR_BUCKETS)
        queries = _weigh(counted, self.factors)
        width = min(width, self.texts.shape[1])
        nearest = [
            top_of_block(torch.from_numpy((queries[start : start + _BATCH] @ self.texts).toarray()), width)
            for start in range(0, max(1, texts.rows), _BATCH)
        ]
        cosine, rows = (torch.cat(parts).numpy() for parts in zip(*nearest, strict=True))
        return cosine, np.where(cosine > 0, rows, PAD)


def _weigh(counted: SparseRows, factors: np.ndarray) -> scipy.sparse.csr_matrix:
    """Return the TF-IDF vectors of counted texts, scaled to unit length."""
    rows = normalize_rows(scale_features(counted, factors))
    return scipy.sparse.csr_matrix((rows.values, rows.ids, rows.offsets), shape=(counted.rows, len(factors)))


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
    """Yield a name, a baseline, and its settings chosen on the training points; only popular labels without tokens."""
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
    if len(texts.entries):
        own = Ragged.from_matrix(ALL_ROWS.ids(scorer.labels, TEXTS)[:, None])  # each text has its own label
        by_texts = Baseline(NearestTexts.of(texts, own, vocabulary).rank, labels, [_TOKENS])
        yield "nearest label texts by TF-IDF", by_texts, {}


def _joined(groups: Iterable[pa.Table], column: str) -> Ragged:
    return Ragged.join(list_column(group, column) for group in groups)
