"""Laws of a fusion: what does not leak into it, and scores that depend on the query alone, whoever asks for them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import extremis
from extremis.evaluation import remarks
from pipelines.sharding.tokenizer import encode_texts
from schemas import PAD
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.ragged import Ragged, SparseRows
from schemas.shard_files.parquet import list_column
from schemas.shares import RowShare
from schemas.table import Table
from scoring import words
from scoring.compiled import compile_serving
from scoring.exported import Exported
from scoring.fitting import (
    RunFusion,
    fit_fusion,
    fit_ranker,
    index_words,
    open_fused,
    open_fusion,
    points_beside,
)
from scoring.fusion import Fusion, FusionTrees, FusionWeights, Reranker, Scorers, ShortlistScores
from scoring.memory import Memory
from scoring.options import FitOptions
from scoring.vectors import Vectors
from scoring.words import hash_texts
from search import topk
from tests.builders import ragged
from tests.command import ROOT, environment
from tests.scoring.fused_run import LABELS, Row, draw_rows, label_rows, name_of, train_and_fuse, write_data
from trainer.evaluation.evaluate import HOLDOUT, SplitScorer
from trainer.evaluation.metrics import Metrics
from trainer.evaluation.ranking import Ranking
from trainer.inputs import Inputs, open_queries, scored_columns
from trainer.methods.sections import Data
from trainer.model import Model, load_model

L, D, S = 30, 5, 6  # labels, dimensions and a shortlist of vectors alone


@dataclass(frozen=True)
class PlainLabels:
    """Vectors of labels [L, D] in NumPy, as an export has them."""

    rows: np.ndarray

    def score(self, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return np.einsum("bd,bsd->bs", x, self.rows[np.maximum(ids, 0)]).astype(np.float32)

    def of(self, rows: np.ndarray) -> "PlainLabels":
        return PlainLabels(rows)

    def search(self, x: np.ndarray) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
        def find(k: int, filters: Ragged, candidates: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
            every = np.tile(np.arange(len(self.rows)), (len(x), 1))
            scores = self.score(x, every)
            left_out = filters.contains(every)
            if candidates is not None:
                left_out |= ~np.isin(every, candidates)
            scores = np.where(left_out, -np.inf, scores)
            ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
            scores = np.take_along_axis(scores, ids, 1)
            return scores, np.where(np.isfinite(scores), ids, PAD)

        return find


@dataclass(frozen=True)
class Rounded(Fusion):
    """Whole numbers, so that many labels have the same score."""

    def parts(self, scored: ShortlistScores, frequency: Any) -> dict[str, np.ndarray]:
        return {"vector": np.floor(scored.by["vector"].astype(np.float64))}

    def to_json(self) -> bytes:
        return b""

    @classmethod
    def parse(cls, data: bytes, place: str) -> "Rounded":
        return cls()


def reranker(fusion: Fusion, draw: np.random.Generator, shortlist: int = S) -> tuple[Reranker, PlainLabels]:
    labels = PlainLabels(draw.integers(-2, 3, (L, D)).astype(np.float32))  # with equal scores
    return Reranker(fusion, Scorers(labels.rows[:, ::-1].copy()), draw.integers(0, 9, L), shortlist), labels


def trees(draw: np.random.Generator, rows: int = 40) -> FusionTrees:
    """Trees fitted to scores drawn by chance, some of which do not exist."""
    ids = np.argsort(draw.random((rows, L)), axis=1)[:, :8]
    by = {name: draw.normal(0, 3, ids.shape) for name in ("vector", "text")}
    by["text"][draw.random(ids.shape) < 0.2] = np.nan
    scored = ShortlistScores(ids, draw.random(ids.shape) < 0.8, by)
    right = draw.random(ids.shape) < 1 / (1 + np.exp(-by["vector"]))
    frequency = draw.integers(0, 9, ids.shape)
    texts = draw.integers(0, 1 << 63, rows).astype(np.uint64)
    return FusionTrees.fit(FusionWeights(unit=2.0), scored, right, frequency, texts)


TREES = trees(np.random.default_rng(5))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, L + 5), st.booleans())
def test_equal_scores_are_in_the_order_of_the_base_score_and_then_of_ids(seed: int, k: int, some: bool) -> None:
    draw = np.random.default_rng(seed)
    fused, labels = reranker(Rounded(), draw, shortlist=L)
    x = draw.random((4, D)).astype(np.float32).round(1)
    filters = ragged([draw.permutation(L)[: draw.integers(0, 4)].tolist() for _ in x])
    candidates = np.sort(draw.permutation(L)[:20]) if some else None
    scores, ids = fused.rank(x, labels, labels.search(x), k, filters, candidates)
    allowed = ~filters.contains(np.tile(np.arange(L), (len(x), 1)))
    if candidates is not None:
        allowed &= np.isin(np.arange(L), candidates)
    vectors = labels.score(x, np.tile(np.arange(L), (len(x), 1)))
    for row in range(len(x)):
        expected = sorted(np.flatnonzero(allowed[row]), key=lambda i: (-np.floor(vectors[row, i]), -vectors[row, i], i))
        listed = ids[row][ids[row] != PAD]
        assert listed.tolist() == expected[:k]
        np.testing.assert_array_equal(scores[row, : len(listed)], np.floor(vectors[row, listed]))
        assert (scores[row, len(listed) :] == -np.inf).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 4, 12]))
def test_the_score_of_a_label_depends_on_the_query_alone(seed: int, k: int) -> None:
    """Whatever is struck or allowed, whichever rows are asked with it, and however many labels are asked for."""
    draw = np.random.default_rng(seed)
    fused, labels = reranker(TREES, draw)
    x = draw.integers(-2, 3, (5, D)).astype(np.float32)
    every = np.tile(np.arange(L), (len(x), 1))
    none = Ragged.empty(len(x))
    table = fused.scores(x, labels, labels.search(x), every)
    struck = ragged([draw.permutation(L)[: draw.integers(0, 9)].tolist() for _ in x])
    for filters in (none, struck):
        for candidates in (None, np.sort(draw.permutation(L)[: S - 1])):
            scores, ids = fused.rank(x, labels, labels.search(x), k, filters, candidates)
            listed = ids != PAD
            found = np.where(listed, np.take_along_axis(table, np.maximum(ids, 0), 1), -np.inf)
            np.testing.assert_array_equal(scores, found)
            assert not filters.contains(ids).any()
            assert candidates is None or np.isin(ids[listed], candidates).all()
            if candidates is not None:  # each candidate is scored, so the best of them are the answer
                allowed = np.isin(every, candidates) & ~filters.contains(every)
                best = -np.sort(-np.where(allowed, table, -np.inf), axis=1)[:, :k]
                np.testing.assert_array_equal(scores[:, : best.shape[1]], best)
    for row in range(len(x)):
        one = x[row : row + 1]
        alone = fused.rank(one, labels, labels.search(one), k, none.slice(row, row + 1))
        for of_one, of_all in zip(alone, fused.rank(x, labels, labels.search(x), k, none), strict=True):
            np.testing.assert_array_equal(of_one[0], of_all[row])
        parts, _ = fused.parts(one, labels, labels.search(one), int(every[0, seed % L]))
        assert sum(parts.values()) == pytest.approx(table[row, seed % L], abs=1e-5)


@settings(max_examples=1, deadline=None)
@given(st.integers(0, 1 << 32))
def test_the_trees_of_a_fold_do_not_know_its_labels(seed: int) -> None:
    draw = np.random.default_rng(seed)
    ids = np.tile(np.arange(6), (60, 1))
    by = {"vector": draw.normal(size=ids.shape)}
    scored, right = ShortlistScores(ids, ids >= 0, by), draw.random(ids.shape) < 0.5
    texts = draw.integers(0, 20, len(ids)).astype(np.uint64)
    frequency = draw.integers(0, 9, ids.shape)
    fitted = FusionTrees.fit(FusionWeights(), scored, right, frequency, texts)
    fused = fitted.fuse(scored, frequency, texts)
    for fold, of_fold in enumerate(fitted.folds):
        own = texts % np.uint64(len(fitted.folds)) == fold
        changed = np.where(own[:, None], draw.random(ids.shape) < 0.5, right)
        again = FusionTrees.fit(FusionWeights(), scored, changed, frequency, texts)
        assert again.folds[fold].as_json() == of_fold.as_json()
        some = scored.rows(own)
        np.testing.assert_array_equal(
            fused[own], replace(fitted, trees=of_fold, folds=()).fuse(some, frequency[own], texts[own])
        )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 32))
def test_trees_are_fitted_if_rows_outside_of_each_fold_tell_something(seed: int) -> None:
    draw = np.random.default_rng(seed)
    ids = np.where(draw.random((draw.integers(1, 9), 2)) < 0.8, np.arange(2), PAD)
    scored = ShortlistScores(ids, ids >= 0, {"vector": draw.normal(size=ids.shape)})
    right = (ids != PAD) & (draw.random(ids.shape) < 0.5)
    texts, none = draw.integers(0, 20, len(ids)).astype(np.uint64), np.zeros(ids.shape)
    if FusionTrees.can_fit(scored, right, texts):
        assert len(FusionTrees.fit(FusionWeights(), scored, right, none, texts).folds) == 3
    else:
        with pytest.raises(InputError, match="boosted trees need both correct and incorrect labels"):
            FusionTrees.fit(FusionWeights(), scored, right, none, texts)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=9), st.data())
def test_rows_with_one_text_have_one_hash(rows: list[list[int]], data: st.DataObject) -> None:
    """Whatever the batch, and as tokens of any type, features or vectors."""
    some = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1)))
    low = data.draw(st.integers(0, len(rows) - 1))
    lists = ragged(rows)
    features = SparseRows(lists.values.astype(np.int32), np.ones(len(lists.values), np.float32), lists.offsets)
    dense = np.array([[len(row), sum(row)] for row in rows], np.float16)
    for inputs in (Inputs(ragged(rows, np.uint16)), Inputs(lists), Inputs(features=features), Inputs(dense=dense)):
        hashes = hash_texts(inputs)
        same = [tuple(each) for each in (rows if inputs.dense is None else dense.tolist())]
        assert (hashes[:, None] == hashes).tolist() == [[one == other for other in same] for one in same]
        np.testing.assert_array_equal(hash_texts(inputs.take(some)), hashes[some])
        np.testing.assert_array_equal(hash_texts(inputs.slice(low, len(rows))), hashes[low:])
    np.testing.assert_array_equal(hash_texts(Inputs(lists)), hash_texts(Inputs(ragged(rows, np.uint16))))


@dataclass
class World:
    """A run on `rows`, of which every third or so is held out, with a fusion of trees, and an export of the run."""

    folder: Path
    rows: list[Row]

    def __post_init__(self) -> None:
        self.data, self.run = str(self.folder / "data"), str(self.folder / "run")
        self.layout = DataLayout(self.data)
        recipe, self.model, self.checkpoint = load_model(self.layout, RunLayout(self.run))
        self.training_data: Data = recipe.data

    @property
    def fusion(self) -> RunFusion:
        return open_fusion(self.data, self.run, self.checkpoint)

    def reranker(self, split: str) -> Reranker:
        return open_fused(self.data, self.run, self.checkpoint, self.model, split)

    def read(self, share: RowShare, split: str = "train") -> pa.Table:
        table = open_queries(self.layout, split)
        return pa.concat_tables(share.batches(table, [*scored_columns(table, self.model.columns), "key"]))

    @property
    def held_out(self) -> pa.Table:
        return self.read(self.training_data.held_out_rows)

    def inputs(self, rows: pa.Table) -> Inputs:
        return Inputs.of(rows.combine_chunks(), self.model.columns)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder, rows = tmp_path_factory.mktemp("reranker"), draw_rows()
    train_and_fuse(folder, write_data(folder, rows, test_share=0.1))
    made = World(folder, rows)
    assert made.fusion.table.parameters["by"] == "trees"
    extremis.export(made.data, made.run, folder / "export", progress=False)
    return made


def repeated(world: World) -> np.ndarray:
    """Which held-out rows have the text of a training row, found by texts."""
    texts = {row["key"]: row["text"] for row in world.rows}
    trained = {texts[key] for key in world.read(world.training_data.training_rows)["key"].to_pylist()}
    return np.array([texts[key] in trained for key in world.held_out["key"].to_pylist()])


def changed(world: World, folder: Path, keys: set[str], seed: int, monkeypatch: pytest.MonkeyPatch) -> World:
    """The same run on data in which rows with some keys have as many other labels."""
    draw = np.random.default_rng(seed)
    others = [f"l{label}" for label in range(LABELS)]
    rows = [
        {**row, "labels": draw.choice(others, len(row["labels"]), False).tolist()} if row["key"] in keys else row
        for row in world.rows
    ]
    write_data(folder, rows, test_share=0.1)
    shutil.copytree(world.run, folder / "run")
    monkeypatch.setattr("trainer.model.require_same_data", lambda *_: None)
    return World(folder, rows)


def test_rows_whose_text_a_training_row_has_do_not_count(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = repeated(world)
    keys = {key for key, is_known in zip(world.held_out["key"].to_pylist(), mask, strict=True) if is_known}
    assert 10 < len(keys) < len(mask) - 80
    fusion = world.fusion
    assert fusion.table.parameters["queries"] == np.count_nonzero(~mask)
    assert {*fusion.left_out(HOLDOUT)[0]} == {*hash_texts(world.inputs(world.held_out))[mask].tolist()}
    other = changed(world, tmp_path, keys, 0, monkeypatch)
    fit_fusion(other.data, other.run, FitOptions(shortlist=15))
    assert other.fusion.fusion.to_json() == fusion.fusion.to_json()
    one, two = ({**each.fusion.table.parameters, "memory": None} for each in (world, other))  # without its speed
    assert one == two
    extremis.export(other.data, other.run, tmp_path / "export", progress=False)
    stated = [json.loads((each.folder / "export" / "calibration.json").read_text()) for each in (world, other)]
    assert stated[0] == stated[1]
    measured = [
        extremis.evaluate(each.data, each.run, split=HOLDOUT, calibrate=True, progress=False).calibration
        for each in (world, other)
    ]
    assert measured[0] == measured[1]
    assert measured[0]["queries"] == np.count_nonzero(~mask)


def test_the_figures_of_a_fit_are_those_of_an_evaluation_of_new_texts(world: World) -> None:
    new = ~repeated(world)
    assert len({*hash_texts(world.inputs(world.held_out))[new].tolist()}) < np.count_nonzero(new)  # some occur twice
    for name, fused in (("trees", world.reranker(HOLDOUT)), ("vectors", None)):
        found: list[np.ndarray] = []
        SplitScorer.open(
            world.layout,
            world.model,
            HOLDOUT,
            ranking=Ranking.of(world.model, rerank=fused),
            training_data=world.training_data,
        ).score(collect=lambda top, *_: found.append(top))
        metrics = Metrics((1, 5))
        rows = np.flatnonzero(new)
        metrics.update(
            np.concatenate(found)[rows, :5], list_column(world.held_out.combine_chunks(), "label_ids").take(rows)
        )
        plain, stated = metrics.result(), world.fusion.table.parameters["metrics"][name]
        assert stated == {metric: pytest.approx(plain[metric], abs=0.01) for metric in ("P@1", "P@5", "nDCG@5")}


@pytest.mark.parametrize("spare", [0, 300])
def test_labels_that_only_held_out_rows_have_judge_nothing(tmp_path: Path, spare: int) -> None:
    """Unless DATA has more `spare` labels, which no row has: then to be without points tells nothing."""
    rows = draw_rows()
    for number, row in enumerate(rows):
        row["labels"] = [*row["labels"], f"l{LABELS + number}"]
    others = [{"key": f"l{number}", "text": f"{number}"} for number in range(LABELS, LABELS + len(rows) + spare)]
    train_and_fuse(tmp_path, write_data(tmp_path, rows, [*label_rows(LABELS), *others]))
    made = World(tmp_path, rows)
    labels = {row["key"]: {*row["labels"]} for row in rows}
    trained = {*made.read(made.training_data.training_rows)["key"].to_pylist()}
    new = np.flatnonzero(~repeated(made))
    held_out = made.held_out["key"].to_pylist()
    own = set[str]().union(*(labels[held_out[row]] for row in new)) - set[str]().union(
        *(labels[key] for key in trained)
    )
    assert len(own) > 20
    keys = Table.open(made.layout.labels, "labels").read(["key"])["key"].to_pylist()
    given_away = made.fusion.left_out(HOLDOUT)[1]
    assert {keys[label] for label in given_away} == (set() if spare else own)
    found: list[np.ndarray] = []
    scorer = SplitScorer.open(made.layout, made.model, HOLDOUT, training_data=made.training_data)
    scorer.score(ks=(100,), collect=lambda top, *_: found.append(top))
    metrics = Metrics((1, 5))
    wanted = list_column(made.held_out.combine_chunks(), "label_ids").take(new)
    kept = [[label for label in row if label not in given_away][:5] for row in np.concatenate(found)[new]]
    metrics.update(np.array(kept), wanted.keep(~np.isin(wanted.entries, given_away)))
    stated = made.fusion.table.parameters["metrics"]["vectors"]
    assert stated == {name: pytest.approx(metrics.result()[name], abs=0.01) for name in stated}
    report = extremis.evaluate(made.data, made.run, split=HOLDOUT, progress=False)
    assert report.more.get("given_away", 0) == len(given_away)
    assert any("holdout alone" in line for line in remarks(report.to_json(), HOLDOUT)) == bool(given_away)


def test_no_held_out_row_is_its_own_neighbour(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, x = world.inputs(world.held_out), world.model.embed(world.inputs(world.held_out))
    unseen, served = world.reranker(HOLDOUT).scorers, world.reranker("test").scorers
    assert unseen.trained_only
    for scorers, own in ((unseen, False), (served, True)):
        assert scorers.neighbours is not None
        assert scorers.memory is not None
        similar, numbers = scorers.neighbours.nearest(inputs, scorers.trained_only)
        assert (numbers >= scorers.neighbours.trained).any() == own
        assert (scorers.memory.nearest(x)[1] >= scorers.memory.trained).any() == own
        assert not own or (similar[:, 0] > 0.999).mean() > 0.99  # of titles, other texts may be as near
        with monkeypatch.context() as patch:
            patch.setattr(words, "_MANY", 1 << 30)  # NumPy in place of Numba
            for one, other in zip(
                scorers.neighbours.nearest(inputs, scorers.trained_only), (similar, numbers), strict=True
            ):
                np.testing.assert_array_equal(one, other)


def test_a_held_out_row_does_not_change_the_scores_of_others(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a fusion is fitted or judged, points, frequencies, neighbours and the ranker are of training rows alone."""
    other = changed(world, tmp_path, {*world.held_out["key"].to_pylist()}, 1, monkeypatch)
    inputs = world.inputs(world.held_out)
    x = world.model.embed(inputs)
    near, found = top(world.model, x, 15), []
    for each in (world, other):
        recipe = load_model(each.layout, RunLayout(each.run))[0]
        memory = Memory.build(world.model, each.layout, recipe.data)
        words = index_words(each.layout, recipe)
        ranker = fit_ranker(each.data, recipe)
        scorers = Scorers(None, memory.first(memory.trained), ranker, *words, trained_only=True)
        scored = scorers.score(x, inputs, Ranking.of(world.model).labels, near, np.full((len(x), 0), PAD))
        frequency = points_beside(each.layout, recipe.data, HOLDOUT)
        found.append({"ids": scored.ids, "near": scored.near, "frequency": frequency, **scored.by})
    one, two = found
    assert one.keys() == two.keys() >= {"vector", "points", "words", "neighbours", "name", "name in title"}
    for name, values in one.items():
        np.testing.assert_array_equal(values, two[name], err_msg=name)


def top(model: Model, x: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
    scores, ids = Ranking.of(model).top_k(x, k, Ragged.empty(len(x)))
    return scores, ids


@pytest.mark.parametrize("split", [HOLDOUT, "test"])
def test_a_run_scores_a_label_the_same_in_every_way(world: World, split: str) -> None:
    draw, fused = np.random.default_rng(0), world.reranker(split)
    rows = (world.held_out if split == HOLDOUT else world.read(RowShare(), "test")).slice(0, 30)
    inputs, ranking = world.inputs(rows), Ranking.of(world.model, rerank=fused)
    x, every = world.model.embed(inputs), np.tile(np.arange(LABELS), (len(rows), 1))
    table = ranking.scores(x, every, inputs)
    none = Ragged.empty(len(rows))
    struck = ragged([draw.permutation(LABELS)[: draw.integers(0, 20)].tolist() for _ in range(len(rows))])
    for filters in (none, struck):
        for candidates in (None, np.arange(0, LABELS, 3)):
            scores, ids = ranking.top_k(x, 7, filters, candidates, inputs)
            np.testing.assert_array_equal(scores, np.take_along_axis(table, ids, 1))
    for row in range(len(rows)):
        alone = inputs.slice(row, row + 1)
        one = ranking.scores(world.model.embed(alone), every[:1], alone)
        np.testing.assert_allclose(one[0], table[row], atol=1e-3)  # rounding may decide a split of the trees


def test_an_export_scores_and_explains_as_evaluate_does(world: World) -> None:
    rows = world.read(RowShare(), "test")
    inputs, model = world.inputs(rows), extremis.load(world.folder / "export")
    ranking = Ranking.of(world.model, rerank=world.reranker("test"))
    scores, ids = ranking.top_k(world.model.embed(inputs), 5, Ragged.empty(len(rows)), None, inputs)
    found, of_export = Exported.open(str(world.folder / "export")).serving.rank(inputs, 5)
    np.testing.assert_allclose(found, scores, atol=1e-5)
    np.testing.assert_array_equal(of_export, ids)
    texts = {row["key"]: row["text"] for row in world.rows}
    asked = [texts[key] for key in rows["key"].to_pylist()]
    for prediction, expected, labels in zip(model.predict(asked, max_labels=5), scores, ids.tolist(), strict=True):
        assert model.labels.ids([label.key for label in prediction.labels]) == labels
        np.testing.assert_allclose([label.score for label in prediction.labels], expected, atol=1e-5)
    seen = set()
    for prediction in model.predict(asked[:3], max_labels=3):
        for label in prediction.labels:
            explained = model.explain(prediction.text, label.key)
            assert explained.score == pytest.approx(label.score, abs=1e-4)
            assert sum(explained.parts.values()) == pytest.approx(explained.score)
            seen |= explained.parts.keys()
    assert seen >= {"bias", "vector", "words", "neighbours", "name", "training points"}


HOSTILE = [
    "",
    " ",
    "\n",
    "qqq",
    "qqq\nbalo",
    "balo",
    "balo\n",
    "\nbalo ce",
    "balo  lome\n\nbalo",
    "ba" * 200,
    "lo " * 300,
]


@pytest.fixture(scope="module")
def models(world: World) -> list[extremis.Model]:
    """The export, open twice: as it is, and compiled."""
    plain, fast = (extremis.load(world.folder / "export") for _ in range(2))
    assert fast.compile()
    return [plain, fast]


def test_one_text_has_the_same_answer_alone_in_a_batch_and_compiled(models: list[extremis.Model]) -> None:
    """Bit by bit between NumPy and compiled loops; a batch may round x in another way."""
    texts = [*HOSTILE, *(row["text"] for row in draw_rows(60, seed=3)), *map(name_of, range(0, LABELS, 7))]
    draw, plain = np.random.default_rng(0), models[0]
    for text, in_batch in zip(texts, plain.predict(texts, max_labels=4), strict=True):
        some = [f"l{label}" for label in draw.permutation(LABELS + 2)[: draw.integers(0, 30)].tolist()]
        own = [key for key in some if key != f"l{LABELS}" and key != f"l{LABELS + 1}"]
        asked: list[dict[str, Any]] = [{"max_labels": 4}, {"max_labels": LABELS}, {"min_probability": 0.1}]
        asked += [{"never": own}, {"never": [own]}, {"allowed": own[:9] or ["l0"], "precision": 0.2, "at_least": 2}]
        asked += [{"allowed": [own[:9]], "groups": [["l0", "l1", "l2"], ["l2", "l3"]], "min_probability": 0.05}]
        for arguments in asked:
            one, other = (model.predict(text, **arguments)[0] for model in models)
            assert one == other, arguments
        alone = plain.predict(text, max_labels=4)[0]
        assert alone.known_tokens == in_batch.known_tokens
        assert [label.key for label in alone.labels] == [label.key for label in in_batch.labels]
        scores = ([label.score for label in each.labels] for each in (alone, in_batch))
        np.testing.assert_allclose(*scores, atol=1e-3)  # rounding may decide a split of the trees


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_each_scorer_has_the_same_scores_compiled(models: list[extremis.Model], data: st.DataObject) -> None:
    """Whichever scorers an export has, and with codes of labels and points."""
    serving = models[0]._exported.serving
    assert serving.fused is not None
    assert serving.fused.scorers.memory is not None
    names = ["memory", "linear", "neighbours", "names", "texts"]
    changes: dict[str, Any] = {"memory": replace(serving.fused.scorers.memory)}  # with codes of its own
    changes |= dict.fromkeys(data.draw(st.sets(st.sampled_from(names))))
    fusion = data.draw(st.sampled_from([serving.fused.fusion, FusionWeights(0.2, 3.0, 2.0, 1.5), Rounded(), None]))
    fused = fusion and replace(serving.fused, fusion=fusion, scorers=replace(serving.fused.scorers, **changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "_CODED", data.draw(st.sampled_from([1, 1 << 12])))
        served = replace(serving, fused=fused, vectors=Vectors(serving.vectors.ranges))
        fast = replace(served, alone=compile_serving(served))
        retired = np.arange(LABELS) % 3 == 0 if data.draw(st.booleans()) else None
        for text in data.draw(st.lists(st.sampled_from([*HOSTILE, *map(name_of, range(9))]), min_size=1, max_size=4)):
            inputs, _ = models[0]._tokenizer.encode([text])
            if data.draw(st.booleans()):
                inputs = replace(inputs, titles=None)
            one, other = (replace(each, retired=retired).rank(inputs, 9) for each in (served, fast))
            for expected, found in zip(one, other, strict=True):
                np.testing.assert_array_equal(found, expected)


@given(
    st.lists(st.sampled_from(["balo", "zyakarona", "qqq", "a" * 99, "a" * 101, "é", " ", "\n", ",", "[UNK]", "x-y"]))
)
def test_tokens_of_remembered_words_are_those_of_the_text(models: list[extremis.Model], parts: list[str]) -> None:
    text, remembered = "".join(parts), models[1]._tokenizer
    values, offsets, _, titles = encode_texts(remembered._tokenizer, [text])
    assert remembered._around is not None
    for one, other in zip(remembered._encode_words(text, *remembered._around), (values, offsets, titles), strict=True):
        np.testing.assert_array_equal(one, other)


MISSING = ("torch", "sklearn", "scipy", "numba", "transformers", "apache_beam")
ALONE = """
import json, sys
sys.modules.update(dict.fromkeys({missing!r}))
import extremis
model = extremis.load({export!r})
found = model.predict({texts!r}, max_labels=5)
print(json.dumps([[(label.key, label.score) for label in each.labels] for each in found]))
assert sum(model.explain({texts!r}[0], 0).parts.values())
assert not model.compile()
"""


def test_trees_are_served_without_torch_and_scikit_learn(world: World) -> None:
    export, texts = str(world.folder / "export"), [row["text"] for row in world.rows[:3]]
    code = ALONE.format(missing=MISSING, export=export, texts=texts)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment({"PYTHONPATH": str(ROOT)}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for found, expected in zip(
        json.loads(done.stdout), extremis.load(export).predict(texts, max_labels=5), strict=True
    ):
        assert [key for key, _ in found] == [label.key for label in expected.labels]
        np.testing.assert_allclose([score for _, score in found], [label.score for label in expected.labels], atol=1e-5)


def test_a_new_version_carries_the_trees_with_scorers_of_its_own_rows(world: World, tmp_path: Path) -> None:
    new = draw_rows(60, LABELS + 5, seed=1, prefix="n")
    data = write_data(tmp_path, new, LABELS + 5, onto=world.data)
    again = {"train.epochs": 1, "logging.tensorboard": False}
    extremis.run("random", data, tmp_path / "run", from_run=world.run, set=again, progress=False)
    _, _, checkpoint = load_model(DataLayout(data), RunLayout(str(tmp_path / "run")))
    carried, before = open_fusion(data, str(tmp_path / "run"), checkpoint), world.fusion
    assert carried.fusion.to_json() == before.fusion.to_json()
    scorers = carried.scorers(None, world.model.device, "test")
    assert scorers.neighbours is not None
    assert scorers.names is not None
    assert scorers.memory is not None
    rows = open_queries(DataLayout(data), "train").rows
    assert scorers.neighbours.labels.rows == scorers.memory.labels.rows == rows > len(world.rows)
    assert scorers.names.of_labels.rows == LABELS + 5
    done = extremis.evaluate(data, tmp_path / "run", progress=False)
    assert done.scores == "fused"
    extremis.export(data, tmp_path / "run", tmp_path / "export", progress=False)
    best = extremis.load(tmp_path / "export").predict("balo " + name_of(LABELS + 1), max_labels=10)[0].labels
    assert f"l{LABELS + 1}" in [label.key for label in best]
