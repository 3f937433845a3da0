"""Labels without a training point: ranked apart and left out, against sorting every score by hand; on several ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from schemas.errors import InputError
from schemas.table import Table
from tests.builders import SmallData, add_filtered_split, build_data, ragged
from tests.command import call, sets
from tests.ranks import on_ranks
from trainer.evaluation.evaluate import SplitScorer
from trainer.evaluation.metrics import Metrics
from trainer.group import ALONE, Group
from trainer.methods.recipe import Recipe
from trainer.model import Model, open_texts

LABELS = 40
FILTERED = "filtered"  # the split with a filter: the greatest positive of every other query


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    built = build_data(str(tmp_path_factory.mktemp("data")), rows={"train": 12, "test": 25}, labels=LABELS)
    add_filtered_split(built, FILTERED, filtered_labels(built.points["test"].positives), 10)
    return built


def filtered_labels(positives: list[list[int]]) -> list[list[int]]:
    return [row[-1:] if number % 2 else [] for number, row in enumerate(positives)]


def recipe_of(head: str) -> Recipe:
    vectors = {"classifier": {"initial_scale": 1.0}}
    sections: dict[str, Any] = {"method": "dexml"} if head == "label-encoder" else vectors
    return Recipe.model_validate({"encoder": {"dimension": 8, "buckets": 64}, **sections})


def model_of(data: SmallData, head: str, group: Group = ALONE) -> Model:
    recipe = recipe_of(head)
    return Model.build(recipe, data.vocabulary, LABELS, 0, group, open_texts(data.layout, recipe))


def scored(group: Group, data: SmallData, head: str, split: str, choices: dict[str, Any]) -> dict[str, Any]:
    return SplitScorer.open(data.layout, model_of(data, head, group), split, group).score(**choices).report()


def ranked(data: SmallData, head: str, split: str) -> np.ndarray:
    """Every label of each test query by descending score; those of the filter last, as pads."""
    model = model_of(data, head)
    url = data.layout.queries(split)
    x = model.embed_table(pa.concat_tables(list(Table.open(url).batches(model.columns))))
    scores = (x @ model.head.vectors.T).numpy()
    for row, labels in enumerate(filtered_labels(data.points["test"].positives) if split == FILTERED else []):
        scores[row, labels] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.where(np.isneginf(np.take_along_axis(scores, order, 1)), -1, order)


def measured(ks: list[int], rankings: list[np.ndarray], positives: list[list[int]]) -> dict[str, float]:
    metrics = Metrics(ks)
    for ranking, labels in zip(rankings, positives, strict=True):
        metrics.update(ranking[None, :], ragged([labels]))
    return metrics.result()


@pytest.mark.parametrize("split", ["test", FILTERED])
@pytest.mark.parametrize("head", ["classifier", "label-encoder"])
def test_apart_is_what_sorting_all_scores_says(data: SmallData, head: str, split: str) -> None:
    report = scored(ALONE, data, head, split, {"zero_shot": True, "ks": [20]})
    unseen = set(np.flatnonzero(data.frequency() == 0).tolist())
    zero_shot = [[label for label in row if label in unseen] for row in data.points["test"].positives]
    having = [row for row, labels in enumerate(zero_shot) if labels]
    apart = report["zero_shot"]
    assert 0 < len(having) < len(zero_shot)
    assert (apart["labels"], apart["queries"]) == (len(unseen), len(having))
    order, kept = ranked(data, head, split), [zero_shot[row] for row in having]
    ks = [1, 3, 5, 10, 20]
    alone = [np.array([label for label in order[row].tolist() if label in unseen]) for row in having]
    assert apart["alone"]["metrics"] == pytest.approx(measured(ks, alone, kept))
    assert apart["among_all"]["metrics"] == pytest.approx(measured(ks, [order[row] for row in having], kept))
    assert set(apart["alone"]["intervals"]) == set(apart["alone"]["metrics"])
    # What is reported besides changes nothing.
    plain = scored(ALONE, data, head, split, {})
    assert {name: report["metrics"][name] for name in plain["metrics"]} == plain["metrics"]
    assert "R@20" in report["metrics"]


@pytest.mark.parametrize("head", ["classifier", "label-encoder"])
def test_seen_only_ranks_labels_with_a_training_point(data: SmallData, head: str) -> None:
    report = scored(ALONE, data, head, FILTERED, {"seen_only": True})
    seen = data.frequency() > 0
    order = [np.array([label for label in row if label >= 0 and seen[label]]) for row in ranked(data, head, FILTERED)]
    expected = measured([1, 3, 5, 10], order, data.points["test"].positives)  # the unseen are still to be found
    assert {name: report["metrics"][name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("choices", [{"zero_shot": True}, pytest.param({"seen_only": True}, marks=pytest.mark.slow)])
def test_two_ranks_find_what_one_finds(data: SmallData, choices: dict[str, bool]) -> None:
    alone = scored(ALONE, data, "label-encoder", FILTERED, choices)
    assert on_ranks(2, scored, data, "label-encoder", FILTERED, choices) == [alone, alone]


def test_a_split_without_zero_shot_positives_says_so(data: SmallData) -> None:
    report = scored(ALONE, data, "classifier", "train", {"zero_shot": True})["zero_shot"]
    assert report == {"labels": int((data.frequency() == 0).sum()), "queries": 0}


def test_bad_requests_are_named(data: SmallData, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="zero_shot=True and seen_only=True: give only one"):
        scored(ALONE, data, "classifier", "test", {"zero_shot": True, "seen_only": True})
    every = build_data(str(tmp_path), rows={"train": 200, "test": 5}, labels=5)
    model = Model.build(recipe_of("classifier"), every.vocabulary, 5)
    with pytest.raises(InputError, match="every label has training points"):
        SplitScorer.open(every.layout, model, "test").score(zero_shot=True)


def test_the_command_shows_both_rankings(data: SmallData, tmp_path: Path) -> None:
    root, run = data.layout.root, tmp_path / "run"
    done = call("train", "random", root, run, *sets("order.batch=4", "train.epochs=1"))
    assert done.status == 0, done.err
    shown = call("evaluate", root, run, "--zero-shot", "--k", "20", "--json")
    apart = shown.json["zero_shot"]
    assert f"{apart['labels']} zero-shot labels, {apart['queries']} queries with such a label" in shown.err
    assert "ranked among themselves" in shown.err
    assert "ranked among all labels" in shown.err
    assert "no query of the split has any" in call("evaluate", root, run, "--zero-shot", "--split", "train").err
