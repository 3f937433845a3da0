"""Weights of scores: never worse than the classifier where they were fitted, their files, and rankings by them."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import PAD
from schemas.errors import InputError, TableError
from schemas.layout import RunLayout
from schemas.ragged import Ragged
from schemas.table import Table
from scoring.fitting import describe_fusion, fit_fusion, open_fused, open_fusion, score_shortlists, scores_of
from scoring.fusion import FusionTrees, FusionWeights, Reranker, Scorers, ShortlistScores
from scoring.linear import LinearRanker
from scoring.memory import Memory
from scoring.names import Names
from scoring.neighbours import Neighbours
from scoring.options import FitOptions
from scoring.words import hash_texts
from tests.builders import Rows, SmallData, build_data, ragged, tokens_of
from tests.trainer.evaluation.small_model import (
    SECTIONS,
    assert_two_ranks_rank_as_one,
    brute_force,
    model_of,
    queries,
)
from tests.training import silent, train, with_sections
from trainer.evaluation.evaluate import SplitScorer, label_statistics
from trainer.evaluation.ranking import Ranking, embed_label_texts
from trainer.group import ALONE, Group
from trainer.inputs import Inputs, open_queries, scored_columns
from trainer.loop import Trainer
from trainer.methods.sections import Data
from trainer.model import Model, load_model


def loss(weights: FusionWeights, scored: ShortlistScores, relevant: Rows) -> float:
    """The loss that a fit minimizes: mean -log of a right label's share of exp(score) among itself and wrong labels,
    plus mean -log of the share of all right labels of a query among all labels."""
    each, of_all = [], []
    for fused, ids, right in zip(weights.fuse(scored), scored.ids.tolist(), relevant, strict=True):
        wrong = np.logaddexp.reduce(
            [-np.inf, *(s for s, i in zip(fused, ids, strict=True) if i >= 0 and i not in right)]
        )
        of_right = [score for score, label in zip(fused, ids, strict=True) if label in right]
        each += [np.logaddexp(0, wrong - score) for score in of_right]
        of_all += [np.logaddexp(0, wrong - np.logaddexp.reduce(of_right))] if of_right else []
    return float(np.mean(each) + np.mean(of_all)) if each else 0.0


@st.composite
def shortlists(draw: st.DrawFn) -> tuple[ShortlistScores, Rows]:
    """Shortlists of several queries, best first by the classifier, some of them short; and each query's labels."""
    queries, width, labels = draw(st.integers(1, 6)), draw(st.integers(1, 8)), 12
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = np.stack([random.permutation(labels)[:width] for _ in range(queries)])
    ids[np.arange(width) >= random.integers(1, width + 1, queries)[:, None]] = -1
    scores = -np.sort(-random.normal(-3, draw(st.sampled_from([0.0, 1.0, 30.0])), ids.shape)).astype(np.float32)
    beside = (random.random(ids.shape).astype(np.float32) * (random.random(ids.shape) < 0.6) for _ in range(3))
    relevant = [random.permutation(labels)[: random.integers(0, 4)].tolist() for _ in range(queries)]
    by = {"vector": np.where(ids < 0, 0, scores), **dict(zip(("text", "points", "words"), beside, strict=True))}
    return ShortlistScores(ids, ids >= 0, by), relevant


@given(shortlists(), st.floats(0.1, 10), *[st.floats(0, 10)] * 3)
def test_no_weights_are_more_likely(
    case: tuple[ShortlistScores, Rows], unit: float, texts: float, votes: float, linear: float
) -> None:
    scored, relevant = case
    right = ragged(relevant).contains(scored.ids)
    weights = FusionWeights.fit(scored, right)
    others = FusionWeights(texts, votes, unit, linear=linear)
    assert loss(weights, scored, relevant) <= loss(others, scored, relevant) * 1.01 + 1e-3
    assert weights.unit > 0
    assert FusionWeights.fit(scored, right) == weights


def test_they_find_the_score_that_tells() -> None:
    draw = np.random.default_rng(0)
    ids, hits = np.tile(np.arange(20), (50, 1)), draw.random((50, 20)) < 0.1
    noise = [draw.random((50, 20)).astype(np.float32) for _ in range(3)]
    found, scores = {}, {"texts": "text", "votes": "points", "linear": "words"}
    for telling, name in scores.items():
        by = {"vector": noise[0], **dict(zip(scores.values(), noise, strict=True)), name: hits.astype(np.float32)}
        found[telling] = FusionWeights.fit(ShortlistScores(ids, ids >= 0, by), hits)
        assert max(scores, key=lambda name: getattr(found[telling], name)) == telling
    by_texts = found["texts"]
    assert (by_texts.reads_texts, FusionWeights().reads_texts) == (True, False)


@given(st.floats(0, 4), st.floats(0, 4), st.floats(1e-3, 1e3), st.floats(0, 4))
def test_they_come_back_from_their_file(texts: float, votes: float, unit: float, linear: float) -> None:
    weights = FusionWeights(texts, votes, unit, linear)
    assert FusionWeights.parse(weights.to_json(), "weights.json") == weights


@pytest.mark.parametrize(
    "change",
    [
        lambda body: "{",
        lambda body: "[]",
        lambda body: "3",
        lambda body: json.dumps({**body, "format": 7}),
        lambda body: json.dumps({**body, "more": 1}),
        lambda body: json.dumps({**body, "votes": "much"}),
        lambda body: json.dumps({**body, "votes": None}),
        lambda body: json.dumps({**body, "votes": [1]}),
        lambda body: json.dumps({**body, "texts": math.nan}),
        lambda body: json.dumps({**body, "unit": 0}),
        lambda body: json.dumps({**body, "unit": math.inf}),
        lambda body: json.dumps({name: value for name, value in body.items() if name != "format"}),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "weights.json"
    path.write_text(change(json.loads(FusionWeights(1.0, 0.5, 2.0).to_json())))
    with pytest.raises(TableError, match=r"weights\.json: not a file of fusion weights.*Fit the fusion again"):
        FusionWeights.parse(path.read_bytes(), str(path))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("weights") / "data"), rows={"train": 60, "val": 40, "test": 30})


def ranking_of(data: SmallData, model: Model, weights: FusionWeights, shortlist: int, group: Group = ALONE) -> Ranking:
    memory = Memory.build(model, data.layout, Data())
    scorers = Scorers(embed_label_texts(model, data.layout), memory)
    return Ranking.of(model, group, Reranker(weights, scorers, label_statistics(data.layout).frequency, shortlist))


def test_votes_add_no_label_that_is_no_candidate(data: SmallData) -> None:
    model = model_of(data)
    x, candidates = queries(data, model), np.arange(0, data.labels, 3)
    ranking = ranking_of(data, model, FusionWeights(votes=50.0), shortlist=2)
    _, everywhere = ranking.top_k(x, 5, Ragged.empty(len(x)))
    assert not np.isin(everywhere, [*candidates, PAD]).all()
    _, ids = ranking.top_k(x, 5, Ragged.empty(len(x)), candidates)
    assert np.isin(ids, [*candidates, PAD]).all()


@pytest.mark.parametrize("shortlist", [2, 30])
def test_a_ranking_is_the_sum_of_all_scores(data: SmallData, shortlist: int) -> None:
    """With a short list, the labels that neighbours vote for come to it."""
    model, weights, k = model_of(data), FusionWeights(0.5, 2.0, 1.5), 5
    x = queries(data, model)
    texts, scores = brute_force(data, model, x)
    votes = np.zeros(scores.shape)
    for row, (low, high) in enumerate(
        itertools.pairwise((of := Memory.build(model, data.layout, Data()).votes(x)).offsets)
    ):
        votes[row, of.ids[low:high]] = of.values[low:high]
    filters = ragged(data.points["test"].positives)
    filtered = filters.contains(np.tile(np.arange(data.labels), (len(x), 1)))
    fused = scores / 1.5 + 0.5 * texts + 2.0 * votes
    best, ids = ranking_of(data, model, weights, shortlist).top_k(x, k, filters)
    for row in range(len(x)):
        allowed = np.flatnonzero(~filtered[row])
        listed = allowed[np.argsort(-scores[row, allowed])[: max(k, shortlist)]]
        candidates = np.union1d(listed, allowed[votes[row, allowed] > 0])
        expected = np.sort(fused[row, candidates])[::-1][:k]
        np.testing.assert_allclose(best[row], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(fused[row, ids[row]], best[row], rtol=1e-4, atol=1e-5)
        assert not filtered[row, ids[row]].any()


def fused_top(group: Group, data: SmallData) -> tuple[np.ndarray, np.ndarray]:
    """The best labels by weights, and by trees over all scorers, which are fitted here."""
    model = model_of(data, group)
    x, none = queries(data, model), Ragged.empty(len(data.points["test"].tokens))
    weights = FusionWeights(0.5, 1.0, 1.0)
    by_weights = ranking_of(data, model, weights, 4, group).top_k(x, 5, none)
    table, columns = open_queries(data.layout, "test"), ["input_ids"]
    words = Neighbours.of(data.layout, Data(), columns), Names.of_data(data.layout, Data())
    whole, linear = model_of(data), LinearRanker.of(data.layout, Data(), columns)
    scorers = Scorers(embed_label_texts(whole, data.layout), Memory.build(whole, data.layout, Data()), linear, *words)
    rows = [*table.batches(scored_columns(table, columns))]
    scored, relevant = score_shortlists(whole, scorers, rows, 4)
    frequency = label_statistics(data.layout).frequency
    hashes = np.concatenate([hash_texts(Inputs.of(each, columns)) for each in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scoring.fusion.SMALL", (20, 8))  # as many in the processes of ranks
        trees = FusionTrees.fit(weights, scored, relevant.contains(scored.ids), frequency[scored.ids], hashes)
    scorers = replace(scorers, texts=embed_label_texts(model, data.layout))  # of the labels of the rank
    ranking = Ranking.of(model, group, Reranker(trees, scorers, frequency, 4))
    tokens = tokens_of(ragged(data.points["test"].tokens, np.uint16))
    both = zip(by_weights, ranking.top_k(x, 5, none, None, tokens), strict=True)
    scores, ids = (np.concatenate(each) for each in both)
    return scores, ids


def test_two_ranks_fuse_as_one(data: SmallData) -> None:
    assert_two_ranks_rank_as_one(fused_top, data)


HEADS = {
    "classifier": {},
    "label-encoder": {"method": "dexml", "loss": {"kind": "decoupled"}},
}


@pytest.mark.parametrize("head", HEADS)
def test_a_run_is_fused_on_what_it_held_out(data: SmallData, tmp_path: Path, head: str) -> None:
    root, run = data.layout.root, str(tmp_path / "run")
    recipe = with_sections({**SECTIONS, "data": {"holdout": 0.2}}, HEADS[head])
    train(Trainer.start(root, run, recipe, silent))
    recipe, model, checkpoint = load_model(data.layout, RunLayout(run))
    with pytest.raises(InputError, match="has no fusion"):
        open_fusion(root, run, checkpoint)
    assert scores_of(run, checkpoint.step) == "classifier"
    manifest, _ = fit_fusion(root, run)
    facts = manifest.parameters
    held_out = recipe.data.held_out_rows.rows(open_queries(data.layout, "train"))
    assert (facts["split"], facts["queries"], facts["repeated"]) == ("holdout", held_out, [])
    assert head == "classifier" or facts["texts"] == 0
    assert scores_of(run, checkpoint.step) == "fused"
    asked = (None, "newest", 7)
    assert [RunLayout(run).scored_step(step) for step in asked] == [checkpoint.step, "newest", 7]
    Table.open(RunLayout(run).fusion(checkpoint.step)).verify()
    opened = open_fusion(root, run, checkpoint)
    memory = opened.memory("test")
    assert (memory is not None) == (facts["by"] == "trees" or facts["votes"] > 0)
    assert facts["memory_bytes"] == (0 if memory is None else memory.bytes)
    assert facts["memory"] == (None if memory is None else memory.facts)
    if memory is not None:  # of all rows, but of those that it is asked about
        of_trained = opened.memory("holdout")
        assert of_trained is not None
        assert (len(memory.vectors), len(of_trained.vectors)) == (60, 60 - held_out)
    assert f"fitted on {held_out} queries of holdout" in describe_fusion(facts)[0]
    has_trees = {"trees"} & {*facts["metrics"]}  # some label of a shortlist is correct
    assert facts["metrics"].keys() == {"vectors", "linear ranker", "weights"} | has_trees
    without = fit_fusion(root, run, FitOptions(), ranker_budget=0)[0].parameters
    assert (without["metrics"].keys() - has_trees, without["linear"]) == ({"vectors", "weights"}, 0)
    assert fit_fusion(root, run, FitOptions())[0].parameters["metrics"] == facts["metrics"]
    scores = {}
    for name, fused in (("alone", None), ("fused", open_fused(root, run, checkpoint, model, "holdout"))):
        ranking = Ranking.of(model, rerank=fused)
        scores[name] = SplitScorer.open(
            data.layout, model, "holdout", ranking=ranking, training_data=recipe.data
        ).score()
    assert scores["fused"].queries == held_out > 5
    values = {name: score.metrics.result()["nDCG@5"] for name, score in scores.items()}
    assert values["fused"] >= values["alone"]
    assert (
        fit_fusion(root, run, FitOptions(split="val", queries=10))[0].parameters["queries"] == 10
    )  # in place of the first
    assert Table.open(RunLayout(run).fusion(checkpoint.step), "fusion").parameters["split"] == "val"
