"""Rankings by labels' texts, by both scores and fused, against brute force over all pairs; and on two ranks."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from papers.ngame import tree as ngame
from schemas.errors import InputError
from schemas.layout import RunLayout
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column
from scoring.fitting import fit_score, open_fusion
from scoring.fusion import FusionTree, Reranker, Scorers, ShortlistScores
from scoring.options import FitOptions
from tests.builders import SmallData, build_data, ragged
from tests.trainer.evaluation.small_model import (
    SECTIONS,
    brute_force,
    model_of,
    queries,
)
from tests.training import silent, train, with_sections
from trainer.checkpoints import Checkpoint
from trainer.evaluation.evaluate import SplitScorer, label_statistics
from trainer.evaluation.ranking import Ranking, embed_label_texts
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.model import Model, load_model
from trainer.modules import open_named
from trainer.stream import open_queries

TREE = "papers.ngame.tree:fit"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("fusion") / "data"), rows={"train": 50, "val": 40, "test": 30})


def tree() -> FusionTree:
    draw = np.random.default_rng(3)
    texts, vectors = draw.standard_normal((2, 1, 500))
    frequency, relevant = draw.integers(0, 9, (1, 500)), draw.random((1, 500)) < 0.3
    scored = ShortlistScores(np.zeros((1, 500), int), np.ones((1, 500), bool), {"vector": vectors, "text": texts})
    return ngame.fit(scored, frequency, relevant)


def test_by_texts_and_by_both_added(data: SmallData) -> None:
    model = model_of(data)
    x = queries(data, model)
    text_scores, vector_scores = brute_force(data, model, x)
    for ranking, expected in (
        (Ranking.of(model), vector_scores),
        (Ranking.by_texts(model, data.layout), text_scores),
        (Ranking.by_texts(model, data.layout, add=True), text_scores + vector_scores),
    ):
        scores, ids = ranking.top_k(x, 5, Ragged.empty(len(x)))
        np.testing.assert_allclose(scores, -np.sort(-expected, axis=1)[:, :5], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(expected, ids, 1), scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shortlist", [3, 8, 100])
def test_fused_scores_rank_the_shortlist(data: SmallData, shortlist: int) -> None:
    model, k = model_of(data), 5
    x, frequency = queries(data, model), label_statistics(data.layout).frequency
    text_scores, vector_scores = brute_force(data, model, x)
    filters = ragged(data.points["test"].positives)
    vector_scores[filters.contains(np.tile(np.arange(data.labels), (len(x), 1)))] = -np.inf
    fused = Reranker(tree(), Scorers(embed_label_texts(model, data.layout)), frequency, shortlist)
    scores, ids = Ranking.of(model, rerank=fused).top_k(x, k, filters)
    for row in range(len(x)):
        listed = [
            label
            for label in np.argsort(-vector_scores[row])[: max(k, shortlist)]
            if vector_scores[row, label] > -np.inf
        ]
        described = text_scores[row, listed], vector_scores[row, listed]
        fusion, units = tree().predict(*described, frequency[listed]), tree().units
        expected = dict(zip(listed, fusion + described[0] / units[0] + described[1] / units[1], strict=True))
        ranked = ids[row][ids[row] >= 0]
        assert len(ranked) == min(k, len(listed))
        np.testing.assert_allclose(
            scores[row, : len(ranked)], sorted(expected.values())[::-1][: len(ranked)], rtol=1e-4
        )
        np.testing.assert_allclose([expected[label] for label in ranked], scores[row, : len(ranked)], rtol=1e-4)


class TestFit:
    @pytest.fixture(scope="class")
    def run(self, data: SmallData, tmp_path_factory: pytest.TempPathFactory) -> str:
        root = str(tmp_path_factory.mktemp("run") / "run")
        train(Trainer.start(data.layout.root, root, Recipe.model_validate(SECTIONS), silent))
        return root

    def test_it_learns_from_the_shortlists_and_from_every_positive(
        self, data: SmallData, run: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = {}
        real = open_named(TREE).object

        def fitted(scored: ShortlistScores, *arguments: np.ndarray) -> FusionTree:
            listed = scored.ids >= 0
            seen["pairs"] = [each[listed] for each in (scored.by["text"], scored.by["vector"], *arguments)]
            assert not any(each[~listed].any() for each in arguments)
            return real(scored, *arguments)

        monkeypatch.setattr("scoring.fitting.open_named", lambda *_, **__: replace(open_named(TREE), object=fitted))
        manifest = fit_score(data.layout.root, run, TREE, FitOptions(shortlist=4))
        _, model, checkpoint = load_model(data.layout, RunLayout(run))
        x = queries(data, model, "val")
        text_scores, vector_scores = brute_force(data, model, x)
        table = open_queries(data.layout, "val")
        rows = [list_column(group, "label_ids") for group in table.batches(["label_ids"])]
        positives = [values[low:high] for values, ends in rows for low, high in itertools.pairwise(ends)]
        frequency = label_statistics(data.layout).frequency
        expected = []
        for row, mine in enumerate(positives):
            for label in {*np.argsort(-vector_scores[row])[:4].tolist(), *mine.tolist()}:
                expected.append((text_scores[row, label], vector_scores[row, label], frequency[label], label in mine))
        pairs = np.stack([np.asarray(part, np.float64) for part in seen["pairs"]], 1)
        assert len(pairs) == len(expected) == manifest.parameters["pairs"]
        order, expected_pairs = np.lexsort(pairs.T.round(3)), np.array(expected, np.float64)
        np.testing.assert_allclose(
            pairs[order], expected_pairs[np.lexsort(expected_pairs.T.round(3))], rtol=1e-3, atol=1e-4
        )
        tree, opened, _ = open_fusion(data.layout.root, run, checkpoint)
        assert opened.digest == manifest.digest
        other_table = replace(checkpoint.table, manifest=checkpoint.table.manifest.model_copy(update={"rows": 1}))
        with pytest.raises(InputError, match="has changed since this fusion was fitted"):
            open_fusion(data.layout.root, run, Checkpoint(other_table))
        scorer = SplitScorer.open(
            data.layout,
            model,
            "val",
            ranking=Ranking.of(
                model, rerank=Reranker(tree, Scorers(embed_label_texts(model, data.layout)), frequency, 4)
            ),
        )
        scorers = scorer, SplitScorer.open(data.layout, model, "val")
        fused, plain = (each.score().metrics.result()["P@1"] for each in scorers)
        assert fused >= plain  # of the very queries that it was fitted on

    def test_what_cannot_be(self, data: SmallData, run: str) -> None:
        with pytest.raises(InputError, match=r"no split 'other'.*--validation"):
            fit_score(data.layout.root, run, TREE, FitOptions(split="other"))
        encoded = Model.build(with_sections(SECTIONS, {"method": "dexml"}), data.vocabulary, data.labels)
        with pytest.raises(InputError, match="labels are scored only by their texts"):
            embed_label_texts(encoded, data.layout)
