"""Baselines: their metrics are those of their rankings with filters struck, on rows that they have not read."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.ragged import Ragged
from scoring.baselines import compare_baselines
from scoring.linear import LinearRanker
from scoring.names import Names
from scoring.neighbours import Neighbours
from tests.builders import Rows, SmallData, add_filtered_split, build_data, ragged, tokens_of
from trainer.evaluation.evaluate import KS, PopularLabels, SplitScorer, label_statistics, measure_popularity
from trainer.evaluation.metrics import Metrics
from trainer.methods.recipe import Recipe
from trainer.methods.sections import Data
from trainer.model import Model
from trainer.stream import open_queries

FILTERED = "filtered"  # the split with a filter: the first positive of every other query
RANKERS = {
    "nearest queries by TF-IDF": lambda layout, rows: Neighbours.of(layout, rows, ["input_ids"]),
    "linear ranker": lambda layout, rows: LinearRanker.of(layout, rows, ["input_ids"]),
    "labels' names in queries": Names.of_data,
}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 12))
def test_popular_labels_are_the_same_for_every_query(frequency: list[int], k: int) -> None:
    scores, ids = PopularLabels(np.array(frequency)).top_k(torch.zeros(3, 0), k, Ragged.empty(3))
    best = sorted(range(len(frequency)), key=lambda label: (-frequency[label], label))[:k]
    assert ids.tolist() == [best + [-1] * (k - len(best))] * 3
    assert scores.tolist() == [[frequency[label] for label in best] + [-math.inf] * (k - len(best))] * 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    built = build_data(
        str(tmp_path_factory.mktemp("baselines")), rows={"train": 25, "test": 20}, vocabulary=15, labels=12
    )
    add_filtered_split(built, FILTERED, filters_of(built), 6)
    return built


def filters_of(data: SmallData) -> Rows:
    return [row[:1] if number % 2 else [] for number, row in enumerate(data.points["test"].positives)]


def expected(data: SmallData, best: np.ndarray, rows: list[int], split: str, filters: Rows) -> dict[str, float]:
    """Metrics of the labels in `best` [N, L], best first, without filtered ones."""
    top = np.full((len(rows), max(KS)), -1)
    for number, (labels, struck) in enumerate(zip(best.tolist(), filters, strict=True)):
        kept = [label for label in labels if label not in struck][: max(KS)]
        top[number, : len(kept)] = kept
    metrics = Metrics(KS, label_statistics(data.layout).inverse_propensity)
    metrics.update(top, ragged([data.points[split].positives[row] for row in rows]))
    return metrics.result()


def ranked(data: SmallData, rows: Data, tokens: Rows) -> dict[str, np.ndarray]:
    """All labels in the order of each baseline, [N, L]."""
    popular = np.argsort(-data.frequency(), kind="stable")
    found = {"popular labels": np.tile(popular, (len(tokens), 1))}
    for name, open_ranker in RANKERS.items():
        ranker = open_ranker(data.layout, rows)
        assert ranker is not None
        found[name] = ranker.rank(tokens_of(ragged(tokens, np.uint16)), data.labels)[1]
    return found


def compared(data: SmallData, split: str, trained: Data | None = None, limit: int | None = None) -> dict[str, Any]:
    """What `compare_baselines` finds beside an untrained model."""
    recipe = Recipe.model_validate({"method": "astra", "encoder": {"dimension": 8, "buckets": 64}})
    model = Model.build(recipe, data.vocabulary, data.labels)
    scorer = SplitScorer.open(data.layout, model, split, training_data=trained)
    scores = scorer.score(limit)
    report = compare_baselines(data.layout, trained or Data(), scorer, scores)
    assert report["beside_baselines"] == {"queries": scores.queries, "metrics": scores.metrics.result()}
    return report


@pytest.mark.parametrize("split", ["test", FILTERED])
def test_their_metrics_are_those_of_the_rankings_with_filters_struck(data: SmallData, split: str) -> None:
    tokens = data.points["test"].tokens
    filters: Rows = filters_of(data) if split == FILTERED else [[] for _ in tokens]
    best, measured = ranked(data, Data(), tokens), compared(data, split)["baselines"]
    assert measured.keys() == best.keys()
    for name, of_queries in best.items():
        wanted = expected(data, of_queries, [*range(20)], "test", filters)
        assert measured[name] == pytest.approx(wanted, abs=1e-4), name
    some = compared(data, split, limit=7)["baselines"]["popular labels"]
    popular = expected(data, best["popular labels"][:7], [*range(7)], "test", filters[:7])
    assert some == pytest.approx(popular, abs=1e-4)
    assert some == measure_popularity(data.layout, split, Data(), 7)


def test_held_out_rows_do_not_give_themselves_away(data: SmallData) -> None:
    trained = Data(holdout=0.2)
    table = open_queries(data.layout, "train")
    held_out = [
        row for rows in trained.held_out_rows.batches(table, ["query_id"]) for row in rows["query_id"].to_pylist()
    ]
    best = ranked(data, trained, [data.points["train"].tokens[row] for row in held_out])
    measured = compared(data, "holdout", trained)["baselines"]
    for name in RANKERS:
        wanted = expected(data, best[name], held_out, "train", [[] for _ in held_out])
        assert measured[name] == pytest.approx(wanted, abs=1e-4), name


def test_rows_of_features_alone_have_popular_labels_alone(tmp_path: Path) -> None:
    sparse = build_data(str(tmp_path / "sparse"), features=20, with_tokens=False)
    recipe = {"method": "astra", "encoder": {"dimension": 8, "inputs": "features", "kind": "bag"}}
    model = Model.build(Recipe.model_validate(recipe), 0, sparse.labels, 20)
    scorer = SplitScorer.open(sparse.layout, model, "test")
    assert [*compare_baselines(sparse.layout, Data(), scorer, scorer.score())["baselines"]] == ["popular labels"]
