"""Which of two finalists becomes the final run, and how its files get there."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from extremis.auto import Contender, Survey, _limit_training, _train_finalists, contenders, propose_second
from extremis.finalists import Finalist, move_run, peaked_first
from schemas.ragged import Ragged
from tests.builders import build_data
from tests.extremis.auto.test_trials import survey
from trainer.evaluation.metrics import Metrics
from trainer.methods.recipe import Recipe
from trainer.recipe_files import load_recipe


def judged(found: np.ndarray) -> Metrics:
    """Scores of rows with a label each, which are frequent and rare by turns: `found` [N] are ranked first."""
    rows = len(found)
    metrics = Metrics((5,), np.array([1.0, 9.0, 1.0]))
    own = np.arange(rows) % 2
    top = np.where(found, own, 2)[:, None]
    metrics.update(top, Ragged.from_counts(own, np.ones(rows, np.int64)), np.arange(rows))
    return metrics


def finalist(fused: Metrics, vectors: Metrics | None = None) -> Finalist:
    judged = {"fused scores": fused, "vectors": vectors or fused}
    return Finalist("", Recipe.model_validate({}), {}, {}, judged, False)


def found(rows: int, better: int = 0, worse: int = 0) -> np.ndarray:
    """The first half of `rows` are found, `better` more, and `worse` fewer."""
    return np.arange(rows) < rows // 2 + better - worse


@pytest.mark.parametrize(
    ("metrics", "wins"),
    [
        (judged(found(1000, better=40)), True),
        (judged(found(1000)), False),  # equal: the cheaper stays
        (judged(found(1000, worse=40)), False),
        # 30 rows gained, 29 lost.
        (judged(found(1000) ^ (np.abs(np.arange(1000) - 499.5) < 29.6)), False),
        # As many rare ones are better as frequent ones are worse: the sum of both metrics is, and one is lower.
        (judged(found(1000) ^ ((np.arange(1000) % 2 == 0) & (np.arange(1000) < 100))), False),
    ],
)
def test_the_dearer_one_wins_beyond_a_standard_error(metrics: Metrics, wins: bool) -> None:
    won, why = finalist(metrics).replaces(finalist(judged(found(1000))))
    assert won == wins
    assert "nDCG@5" in why
    assert "PSP@5" in why
    assert "1,000 held-out rows" in why


@pytest.mark.parametrize(("fused", "wins"), [(0, True), (40, True), (-40, False)])
def test_vectors_decide_where_fused_scores_do_not(fused: int, wins: bool) -> None:
    """40 more rows are found by the vectors alone."""
    dearer = finalist(judged(found(1000, better=fused)), judged(found(1000, better=40)))
    won, why = dearer.replaces(finalist(judged(found(1000))))
    assert won == wins
    assert ("by vectors" in why) == (fused == 0)


def test_finalists_share_the_time_that_is_left_if_there_is_a_limit() -> None:
    recipe = Recipe.model_validate({})
    assert _limit_training(recipe, 0, 1.0, 300.0, 0.0, 2) == recipe
    alone, shared = (_limit_training(recipe, 25, 1.0, 300.0, 0.0, number).train.minutes for number in (1, 2))
    assert (alone, shared) == (18, 9)  # of 20 minutes, without a tenth for the fusion


def test_an_early_peak_is_more_than_chance() -> None:
    course = [judged(found(1000, better=better)) for better in (40, 10, 0)]
    assert peaked_first(course, "nDCG@5")
    assert not peaked_first([course[1], course[0], course[2]], "nDCG@5")
    assert not peaked_first([judged(found(1000, better=1)), judged(found(1000))], "nDCG@5")
    assert not peaked_first(course[:1], "nDCG@5")
    assert not peaked_first([], "nDCG@5")


def test_the_second_one_is_decoupled_softmax_where_labels_have_texts() -> None:
    first, texts = finalist(judged(found(9))), survey()
    none = replace(texts, texts=0.0)
    chosen = Contender("astra", ("data.label_texts=true", "negatives.hard=0", "encoder.ngram_weight=0.4"))
    _, second = propose_second(chosen, first.recipe, texts)
    margin = "negatives.hard_margin=2.303"
    assert (second.recipe, second.changes[:2], second.changes[-1]) == (
        "decoupled",
        ("encoder.ngram_weight=0.4", "encoder.dropout=0.3"),
        margin,
    )
    assert "negatives.hard=20" in second.changes
    _, second = propose_second(chosen, first.recipe, none)
    assert second == chosen.changed("encoder.dropout=0.3", *second.changes[4:])
    fresh = replace(first, recipe=Recipe.model_validate({"negatives": {"hard": 100}}))  # where it finds them now
    assert propose_second(chosen, fresh.recipe, none)[1] == chosen.changed("encoder.dropout=0.3", margin)
    dual = next(each for each in contenders(survey()) if each.is_dual_encoder)
    assert propose_second(dual, first.recipe, texts)[1] == dual
    peak = Recipe.model_validate({"encoder": {"lr": 0.5}})
    halved = ("encoder.lr=0.25", "encoder.dense_lr=0.0005", "classifier.lr=0.05")
    assert propose_second(chosen, peak, texts, peaked_first=True)[1] == chosen.changed(*halved)


@pytest.mark.parametrize(("peaked", "count"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_finalists_are_the_same_side_by_side_and_in_a_row(tmp_path: Path, peaked: bool, count: int) -> None:
    data = build_data(str(tmp_path / "data"), rows={"train": 60}, labels=30, most_positives=2).layout
    recipe, trained = load_recipe("renee", ["encoder.lr=0.5"]), list[tuple[str, Recipe]]()

    def train_in(place: str, recipe: Recipe, later: int, **_: Any) -> Callable[[], Finalist]:
        trained.append((Path(place).name, recipe))
        first = replace(finalist(judged(found(100))), place=place, peaked_first=peaked)
        return lambda: first

    side = SimpleNamespace(count=count, start=lambda work, *_: work, bar=lambda _: contextlib.nullcontext())
    side.end = lambda: trained.__delitem__(slice(1, None))
    report: dict[str, Any] = {"finalists": []}
    given = recipe, Contender("renee"), Survey.of(data), (), report
    first = _train_finalists(data.root, str(tmp_path), *given, train_in, side)  # type: ignore[arg-type]
    assert Path(first.place).name == "1"
    (_, _), (place, second) = trained
    assert (place, second.encoder.model_dump()["lr"] == 0.25) == ("2", peaked)


def test_a_move_leaves_no_run_before_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, run = tmp_path / "finalists" / "1", tmp_path / "run"
    (place / "checkpoints" / "9").mkdir(parents=True)
    names = ["checkpoints/9/a", "config.toml", "finished.json", "metrics.jsonl"]
    for name in names:
        (place / name).write_text(name)
    moved: list[list[str]] = []
    from schemas import storage

    move = storage.move_files
    monkeypatch.setattr(storage, "move_files", lambda *given: (moved.append(list(given[2])), move(*given)))
    move_run(str(place), str(run))
    assert moved[-1] == ["config.toml"]
    assert moved[0] == ["finished.json"]  # without it, training is tried again
    assert sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()) == names
