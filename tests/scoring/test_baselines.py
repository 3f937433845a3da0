"""Baselines against the plainest computation: every pair of texts, every label, in dictionaries."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.neighbors import KNeighborsClassifier

from schemas.ragged import Ragged
from scoring import baselines
from scoring.baselines import NearestTexts, compare_baselines
from scoring.memory import NEIGHBOURS, TEMPERATURE
from tests.builders import Rows, SmallData, add_filtered_split, build_data, ragged
from trainer.evaluation.evaluate import KS, PopularLabels, SplitScorer, label_statistics, measure_popularity
from trainer.evaluation.metrics import Metrics
from trainer.inputs import Inputs
from trainer.methods.recipe import Recipe
from trainer.methods.sections import Data
from trainer.model import Model
from trainer.stream import open_queries

VOCABULARY = 15
FILTERED = "filtered"  # the split with a filter: the first positive of every other query
Weights = dict[tuple[int, ...], float]

some_texts = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=6), min_size=1, max_size=12)


def weigh(text: list[int], documents: Rows, ngrams: int = 2) -> Weights:
    """TF-IDF of a text's words, and pairs of words, of unit length."""
    counts = Counter[tuple[int, ...]]([(token,) for token in text] + [*itertools.pairwise(text)] * (ngrams - 1))
    seen = [{*((token,) for token in document), *itertools.pairwise(document)} for document in documents]
    weights = {
        term: (1 + math.log(count)) * (math.log((1 + len(documents)) / (1 + sum(term in s for s in seen))) + 1)
        for term, count in counts.items()
    }
    norm = math.sqrt(sum(weight**2 for weight in weights.values())) or 1
    return {term: weight / norm for term, weight in weights.items()}


def brute_force(
    query: list[int],
    texts: Rows,
    labels: Rows,
    neighbours: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
    ngrams: int = 2,
) -> dict[int, float]:
    """Votes of the nearest texts that share a word with the query, by label."""
    mine, weighed = weigh(query, texts, ngrams), [weigh(text, texts, ngrams) for text in texts]
    cosine = [sum(weight * other.get(term, 0) for term, weight in mine.items()) for other in weighed]
    nearest = sorted((i for i, value in enumerate(cosine) if value > 0), key=lambda i: (-cosine[i], i))[:neighbours]
    shares = {i: math.exp((cosine[i] - 1) / temperature) for i in nearest}
    votes = Counter[int]()
    for i, share in shares.items():
        votes.update({label: share / sum(shares.values()) for label in labels[i]})
    return dict(votes)


def same(scores: np.ndarray, ids: np.ndarray, votes: dict[int, float]) -> None:
    """Check that a ranking has the greatest of the votes, best first, and then pads."""
    listed = ids >= 0
    expected = sorted(votes.values(), reverse=True)[: len(ids)]
    assert listed.tolist() == [True] * len(expected) + [False] * (len(ids) - len(expected))
    np.testing.assert_allclose(scores[listed], expected, atol=2e-4)
    np.testing.assert_allclose([votes[label] for label in ids[listed].tolist()], scores[listed], atol=2e-4)
    assert (scores[~listed] == -np.inf).all()


@given(some_texts, some_texts)
def test_near_texts_vote_as_every_pair_says(texts: Rows, queries: Rows) -> None:
    labels = [[number % 5, 5 + number] for number in range(len(texts))]
    baseline = NearestTexts.of(ragged(texts), ragged(labels), VOCABULARY)
    scores, ids = baseline.rank(Inputs(ragged(queries)), 8)
    for row, query in enumerate(queries):
        same(scores[row], ids[row], brute_force(query, texts, labels))


def test_of_many_texts_only_the_nearest_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "_BATCH", 7)
    draw = np.random.default_rng(0)
    texts, queries = (draw.integers(0, VOCABULARY, (rows, 9)).tolist() for rows in (60, 20))
    labels = [[number] for number in range(60)]
    for ngrams, temperature in ((1, 0.2), (2, 0.05)):
        built = NearestTexts.of(ragged(texts), ragged(labels), VOCABULARY, ngrams)
        index = replace(built, neighbours=4, temperature=temperature)
        scores, ids = index.rank(Inputs(ragged(queries)), 6)
        for row, query in enumerate(queries):
            same(scores[row], ids[row], brute_force(query, texts, labels, 4, temperature, ngrams))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 12))
def test_popular_labels_are_the_same_for_every_query(frequency: list[int], k: int) -> None:
    scores, ids = PopularLabels(np.array(frequency)).top_k(torch.zeros(3, 0), k, Ragged.empty(3))
    best = sorted(range(len(frequency)), key=lambda label: (-frequency[label], label))[:k]
    assert ids.tolist() == [best + [-1] * (k - len(best))] * 3
    assert scores.tolist() == [[frequency[label] for label in best] + [-math.inf] * (k - len(best))] * 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    built = build_data(
        str(tmp_path_factory.mktemp("baselines")), rows={"train": 25, "test": 20}, vocabulary=VOCABULARY, labels=12
    )
    add_filtered_split(built, FILTERED, filters_of(built), 6)
    return built


def filters_of(data: SmallData) -> Rows:
    return [row[:1] if number % 2 else [] for number, row in enumerate(data.points["test"].positives)]


def expected(
    data: SmallData, votes: list[dict[int, float]], rows: list[int], split: str, filters: Rows
) -> dict[str, float]:
    """Metrics of the labels with the most votes, without filtered ones."""
    top = np.full((len(rows), max(KS)), -1)
    for number, (of_query, struck) in enumerate(zip(votes, filters, strict=True)):
        best = sorted(of_query.keys() - {*struck}, key=lambda label: (-round(of_query[label], 5), label))[: max(KS)]
        top[number, : len(best)] = best
    metrics = Metrics(KS, label_statistics(data.layout).inverse_propensity)
    metrics.update(top, ragged([data.points[split].positives[row] for row in rows]))
    return metrics.result()


def compared(data: SmallData, split: str, trained: Data | None = None, limit: int | None = None) -> dict[str, Any]:
    """What `compare_baselines` finds beside an untrained model."""
    recipe = Recipe.model_validate({"method": "astra", "encoder": {"dimension": 8, "buckets": 64}})
    model = Model.build(recipe, data.vocabulary, data.labels)
    scorer = SplitScorer.open(data.layout, model, split, training_data=trained)
    scores = scorer.score(limit)
    report = compare_baselines(data.layout, trained or Data(), scorer, scores)
    assert report["beside_baselines"] == {"queries": scores.queries, "metrics": scores.metrics.result()}
    return report


def chosen(report: dict[str, Any]) -> tuple[int, float, int]:
    of = report["choices"]["nearest queries by TF-IDF"]
    return of["neighbours"], of["temperature"], of["ngrams"]


@pytest.mark.parametrize("split", ["test", FILTERED])
def test_their_metrics_are_those_of_the_rankings_with_filters_struck(data: SmallData, split: str) -> None:
    train, test = data.points["train"], data.points["test"]
    filters: Rows = filters_of(data) if split == FILTERED else [[] for _ in test.tokens]
    popular = {label: float(count) for label, count in enumerate(data.frequency().tolist())}
    own, report = [[label] for label in range(data.labels)], compared(data, split)
    choice = chosen(report)
    votes = {
        "popular labels": [popular for _ in test.tokens],
        "nearest queries by TF-IDF": [brute_force(q, train.tokens, train.positives, *choice) for q in test.tokens],
        "nearest label texts by TF-IDF": [brute_force(query, data.label_points.tokens, own) for query in test.tokens],
    }
    measured = report["baselines"]
    del measured["linear ranker"]
    assert measured.keys() == votes.keys()
    for name, of_queries in votes.items():
        wanted = expected(data, of_queries, [*range(20)], "test", filters)
        assert measured[name] == pytest.approx(wanted, abs=1e-4), name
    some = compared(data, split, limit=7)["baselines"]["popular labels"]
    assert some == pytest.approx(expected(data, [popular] * 7, [*range(7)], "test", filters[:7]), abs=1e-4)
    assert some == measure_popularity(data.layout, split, Data(), 7)


def test_on_rows_that_were_held_out_only_the_others_vote(data: SmallData) -> None:
    trained, train = Data(holdout=0.2), data.points["train"]
    table = open_queries(data.layout, "train")
    kept, held_out = (
        [row for rows in part.batches(table, ["query_id"]) for row in rows["query_id"].to_pylist()]
        for part in (trained.training_rows, trained.held_out_rows)
    )
    texts, labels = [train.tokens[row] for row in kept], [train.positives[row] for row in kept]
    report = compared(data, "holdout", trained)
    votes = [brute_force(train.tokens[row], texts, labels, *chosen(report)) for row in held_out]
    measured = report["baselines"]["nearest queries by TF-IDF"]
    assert measured == pytest.approx(expected(data, votes, held_out, "train", [[] for _ in held_out]), abs=1e-4)


def test_the_votes_are_the_best_for_the_points_themselves_each_without_its_own(data: SmallData) -> None:
    """Of all settings that are tried, by the plainest leave-one-out."""
    train, found = data.points["train"], {}
    for ngrams in (1, 2):
        weighed = [weigh(text, train.tokens, ngrams) for text in train.tokens]
        for neighbours, temperature in baselines._TRIED:
            top = np.full((len(weighed), 5), -1)
            for row, mine in enumerate(weighed):
                cosine = [sum(w * other.get(term, 0) for term, w in mine.items()) for other in weighed]
                others = [other for other in range(len(weighed)) if other != row and cosine[other] > 0]
                votes = Counter[int]()
                for other in sorted(others, key=lambda o: (-cosine[o], o))[:neighbours]:
                    votes.update(dict.fromkeys(train.positives[other], math.exp((cosine[other] - 1) / temperature)))
                best = sorted(votes, key=lambda label: (-votes[label], label))[:5]
                top[row, : len(best)] = best
            metrics = Metrics((5,))
            metrics.update(top, ragged(train.positives))
            found[neighbours, temperature, ngrams] = metrics.result()["nDCG@5"]
    assert found[chosen(compared(data, "test"))] == pytest.approx(max(found.values()), abs=0.5)


def test_rows_of_features_alone_have_popular_labels_alone(tmp_path: Path) -> None:
    sparse = build_data(str(tmp_path / "sparse"), features=20, with_tokens=False)
    recipe = {"method": "astra", "encoder": {"dimension": 8, "inputs": "features", "kind": "bag"}}
    model = Model.build(Recipe.model_validate(recipe), 0, sparse.labels, 20)
    scorer = SplitScorer.open(sparse.layout, model, "test")
    assert [*compare_baselines(sparse.layout, Data(), scorer, scorer.score())["baselines"]] == ["popular labels"]


@pytest.mark.parametrize("noise", [5, 12])
def test_near_texts_vote_as_well_as_the_best_weighted_neighbours_of_scikit_learn(noise: int) -> None:
    """Short texts of a few hundred words: one word in the text depends on the label, and `noise` words do not."""
    draw = np.random.default_rng(noise)
    label = draw.integers(0, 30, 2200)
    own = 3 * label + draw.integers(0, 3, label.size)
    others = 90 + np.minimum(draw.geometric(0.01, (label.size, noise)), 300)
    tokens = np.concatenate([own[:, None], others], axis=1)
    train, test = slice(0, 2000), slice(2000, None)
    texts, labels = (Ragged.from_matrix(rows[train]) for rows in (tokens, label[:, None]))
    index = NearestTexts.chosen(texts, labels, 400)
    found = index.rank(Inputs(Ragged.from_matrix(tokens[test])), 1)[1][:, 0] == label[test]
    written = [" ".join(f"w{token}" for token in row) for row in tokens.tolist()]
    best = 0.0
    for ngrams, neighbours, weights in itertools.product((1, 2), (5, 10, 30, 100), ("distance", lambda d: 1 - d)):
        vectors = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, ngrams))
        neighbors = KNeighborsClassifier(neighbours, weights=weights, metric="cosine")
        neighbors.fit(vectors.fit_transform(written[train]), label[train])
        best = max(best, neighbors.score(vectors.transform(written[test]), label[test]))
    assert found.mean() >= best - 0.02
