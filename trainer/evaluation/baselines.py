"""Baselines that a model should outperform, and the baselines' metrics on the first queries of a split."""

import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa

from schemas import PAD
from schemas.layout import DataLayout
from schemas.ragged import Ragged, pad_columns
from schemas.shard_files.parquet import filters_of, list_column
from schemas.shares import ALL_ROWS
from schemas.table import Table
from trainer.evaluation.evaluate import KS
from trainer.evaluation.metrics import Metrics
from trainer.evaluation.split import label_statistics, open_split
from trainer.inputs import Inputs, scored_columns
from trainer.linear.ranker import LinearRanker
from trainer.methods.sections import Data
from trainer.model import DataSizes
from trainer.stream import open_queries

# Ranks labels without a model: texts of token ids -> (scores [B, k], label ids [B, k] best first, padded with -1).
Baseline = Callable[[Ragged, int], tuple[np.ndarray, np.ndarray]]
TEXTS = 100_000  # maximum number of training points that a query is compared with
QUERIES = 2_000  # number of queries of a split to measure on
_TOKENS = "input_ids"


def rank_popular(frequency: np.ndarray, texts: Ragged, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank labels by `frequency` [L], identically for each text: a Baseline."""
    order = np.argsort(-frequency, kind="stable")[:k]
    order = pad_columns(np.tile(order, (texts.rows, 1)), k, PAD)
    return np.where(order == PAD, -np.inf, frequency[order]), order


def measure_popularity(
    data: DataLayout,
    split: str,
    training_data: Data,
    queries: int,
    ks: Sequence[int] = KS,
    window: str | Sequence[str] = "",
) -> dict[str, float]:
    """Return metrics of predicting the most frequent labels, on the first `queries` of `split` or of parts in `window`.

    Raises the same errors as `measure_baselines`.
    """
    statistics = label_statistics(data, training_data)
    table, share = open_split(data, split, training_data, window, queries)
    groups = share.batches(table, scored_columns(table, []), queries)
    popular = functools.partial(rank_popular, statistics.frequency)
    return _score(popular, groups, Metrics(ks, statistics.inverse_propensity))


def measure_baselines(
    data: DataLayout, split: str, training_data: Data | None = None, queries: int = QUERIES, filter: bool = True
) -> dict[str, dict[str, float]]:
    """Return the metrics of each baseline on the first `queries` of `split`.

    The baselines predict the most frequent labels and, if rows have tokens, the labels of similar texts and the labels
    that a linear ranker chooses. `training_data`: the rows that a model was trained on; `filter=False` applies no
    filter. Raises InputError if the split does not exist. Raises TableError.
    """
    from trainer.evaluation.tfidf import NearestTexts  # imports SciPy, which a trainer does not load

    training_data = training_data or Data()
    statistics = label_statistics(data, training_data)
    table, share = open_split(data, split, training_data)
    tokens = [_TOKENS] if _TOKENS in table.columns else []
    groups = list(share.batches(table, scored_columns(table, tokens), queries))
    baselines: dict[str, Baseline] = {"popular labels": functools.partial(rank_popular, statistics.frequency)}
    if tokens:
        vocabulary = DataSizes.of(data).vocabulary
        trained_on = open_queries(data, training_data.split)
        points = list(training_data.training_rows.batches(trained_on, [_TOKENS, "label_ids"], TEXTS))
        texts, labels = _joined(points, _TOKENS), _joined(points, "label_ids")
        baselines["nearest queries by TF-IDF"] = NearestTexts.of(texts, labels, vocabulary).rank
        words = LinearRanker.of(data, training_data, tokens)
        if words is not None:
            baselines["linear ranker"] = lambda texts, k: words.rank(Inputs(texts), k)
        named = Table.open(data.labels, "labels")
        texts = _joined(ALL_ROWS.batches(named, [_TOKENS], TEXTS), _TOKENS)
        labels = Ragged.from_matrix(ALL_ROWS.ids(named, TEXTS)[:, None])  # each text has its own label
        if len(texts.entries):
            baselines["nearest label texts by TF-IDF"] = NearestTexts.of(texts, labels, vocabulary).rank
    return {
        name: _score(baseline, groups, Metrics(KS, statistics.inverse_propensity), filter)
        for name, baseline in baselines.items()
    }


def _score(baseline: Baseline, groups: Iterable[pa.Table], metrics: Metrics, filter: bool = True) -> dict[str, float]:
    depth = max(metrics.ks)
    for rows in groups:
        filters = filters_of(rows) if filter else Ragged.empty(rows.num_rows)
        texts = list_column(rows, _TOKENS) if _TOKENS in rows.column_names else Ragged.empty(rows.num_rows)
        scores, ids = baseline(texts, depth + filters.longest)
        top, _ = filters.filter_ranking(ids, scores, depth)
        metrics.update(top, list_column(rows, "label_ids"))
    return metrics.result()


def _joined(groups: Iterable[pa.Table], column: str) -> Ragged:
    return Ragged.join(list_column(group, column) for group in groups)
