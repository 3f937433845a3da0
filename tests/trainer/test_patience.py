"""Early stopping: the run is the beginning of the one without it, wherever it is killed, and on several ranks."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from schemas import storage
from schemas.layout import RunLayout
from schemas.manifest import is_published
from tests.builders import SmallData, build_data
from tests.ranks import on_ranks
from tests.training import assert_resumes, silent, train, with_sections
from trainer.checkpoints import latest_checkpoint
from trainer.group import ALONE, Group
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.tracking import read_metrics

EPOCHS = 12
BASE = {
    "order": {"batch": 16, "streams": 4, "window_groups": 2, "threads": 1},
    "encoder": {"dimension": 4, "buckets": 64},
    "negatives": {"random": 6, "hard": 0, "width": 0},
    "train": {"epochs": EPOCHS, "threads": 1},
    "checkpoint": {"every_steps": 4, "keep": 1},
    "validation": {"split": "test", "metric": "P@5"},
    "logging": {"every_steps": 1, "tensorboard": False},
}


def recipe(patience: int) -> Recipe:
    return with_sections(BASE, {"validation": {**BASE["validation"], "patience": patience}})


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://patience/data")


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> Iterator[RunLayout]:
    return (RunLayout(f"memory://patience/{request.node.name}/{number}") for number in count())


@pytest.fixture(scope="module")
def scores(data: SmallData) -> list[float]:
    """The metric after each epoch of a run without patience."""
    run = RunLayout("memory://patience/whole")
    train(Trainer.start(data.layout.root, run.root, recipe(0), silent))
    return scores_of(run)


def scores_of(run: RunLayout) -> list[float]:
    return [record["P@5"] for record in read_metrics(run) if record["kind"] == "validation"]


def end_of(scores: list[float], patience: int) -> tuple[int, int]:
    """Return the epochs of a run that ends after `patience` scores in a row that are not above all before; its best."""
    for epochs in range(1, len(scores) + 1):
        best = scores.index(max(scores[:epochs]))
        if epochs - 1 - best >= patience:
            return epochs, best
    return len(scores), scores.index(max(scores))


@pytest.mark.parametrize("patience", [1, 2, 3, EPOCHS])
def test_a_run_ends_once_patience_is_over(
    patience: int, data: SmallData, scores: list[float], runs: Iterator[RunLayout]
) -> None:
    run, said = next(runs), list[str]()
    epochs, best = end_of(scores, patience)
    trainer = Trainer.start(data.layout.root, run.root, recipe(patience), said.append)
    losses = train(trainer)
    assert scores_of(run) == scores[:epochs]
    steps = trainer.stream.steps
    assert len(losses) == epochs * steps
    assert json.loads(storage.read_bytes(run.finished)) == {"step": epochs * steps, "epochs": epochs}
    stopped = [record for record in read_metrics(run) if record["kind"] == "stopped"]
    assert len(stopped) == (epochs < EPOCHS)
    assert sum("stopped early" in line for line in said) == len(stopped)
    for record in stopped:
        assert record["epoch"] == epochs - 1
        assert (record["best"], record["best_step"]) == (scores[best], (best + 1) * steps)
        assert latest_checkpoint(run).step == epochs * steps
        assert is_published(run.checkpoint(record["best_step"]))


@pytest.mark.parametrize("stop", [7, 14, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (1, 10, 23))])
def test_a_killed_run_ends_at_the_same_step(
    stop: int, data: SmallData, scores: list[float], runs: Iterator[RunLayout]
) -> None:
    whole, cut = next(runs), next(runs)
    losses = train(Trainer.start(data.layout.root, whole.root, recipe(2), silent))
    assert_resumes(data.layout.root, cut.root, recipe(2), losses, min(stop, len(losses) - 1))
    assert storage.read_bytes(cut.finished) == storage.read_bytes(whole.finished)
    assert latest_checkpoint(cut).state == latest_checkpoint(whole).state
    assert train(Trainer.resume(data.layout.root, cut.root, recipe(2), silent)) == []


@pytest.mark.slow
def test_ranks_end_together(tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data"))
    alone = train_on(ALONE, data.layout.root, str(tmp_path / "alone"))
    for rank in on_ranks(2, train_on, data.layout.root, str(tmp_path / "two")):
        assert rank == alone
    assert alone[0] < EPOCHS


def train_on(group: Group, data: str, run: str) -> tuple[int, int | None]:
    """Return the epochs and the best step of a run with patience."""
    trainer = Trainer.start(data, run, recipe(1), silent, group)
    train(trainer)
    return trainer.progress.epoch, trainer.progress.best_step


def test_patience_needs_validations() -> None:
    body: dict[str, Any] = {"validation": {"patience": 3}}
    with pytest.raises(ValidationError, match=r"validation\.patience = 3"):
        Recipe.model_validate(body)
    Recipe.model_validate({**body, "data": {"holdout": 0.1}})
