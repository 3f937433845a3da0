"""Runs that are given minutes: how many epochs that makes, and that a resumed run keeps to what was decided."""

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import storage
from schemas.errors import InputError
from schemas.layout import RunLayout
from tests.builders import SmallData, build_data
from tests.recipes import RECIPES
from tests.training import Killed, silent, train, with_sections
from trainer import loop as epoch_module
from trainer.loop import Progress, Trainer
from trainer.methods.recipe import Recipe
from trainer.recipe_files import load_recipe
from trainer.schedule import Budget, epochs_that_fit
from trainer.tracking import read_metrics

MOST = 9
BASE: dict[str, dict] = {
    "order": {"batch": 16, "streams": 4},
    "encoder": {"dimension": 4, "buckets": 64, "optimizer": "adagrad"},
    "classifier": {"initial_scale": 0.5, "weight_decay": 0.01},
    "negatives": {"random": 4},
    "train": {"epochs": MOST, "threads": 1},
    "checkpoint": {"every_epochs": 2, "every_steps": 4},
    "logging": {"tensorboard": False, "every_steps": 1},
}


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://budget/data", rows={"train": 90, "test": 5})


@pytest.fixture(autouse=True)
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The loop's clock: every look at it takes `pace` seconds."""
    clock = SimpleNamespace(now=0.0, pace=1.0)

    def perf_counter() -> float:
        clock.now += clock.pace
        return clock.now

    monkeypatch.setattr(epoch_module, "time", SimpleNamespace(perf_counter=perf_counter))
    return clock


def timed(seconds: float) -> Recipe:
    return with_sections(BASE, {"train": {"minutes": seconds / 60}})


def started(data: SmallData, name: str, recipe: Recipe) -> Trainer:
    return Trainer.start(data.layout.root, f"memory://budget/{name}", recipe, silent)


def planned(trainer: Trainer) -> list[int]:
    """Epochs of the run, as decided before each."""
    return [line["epochs"] for line in read_metrics(trainer.run) if line["kind"] == "adoption"]


@given(st.floats(0.1, 100), st.floats(0.1, 1000), st.integers(1, 50))
def test_an_even_pace_ends_hardly_late_and_less_than_an_epoch_early(minutes: float, pace: float, most: int) -> None:
    epoch_seconds: list[float] = []
    epochs = most
    while len(epoch_seconds) < epochs:  # as the trainer does
        epochs = epochs_that_fit(minutes, most, epoch_seconds)
        epoch_seconds.append(pace)
    over = sum(epoch_seconds) - minutes * 60
    assert -pace < over <= pace / 10 + 1e-6 or (over < 0 and epochs == most) or (over > 0 and epochs <= 2)


@given(st.lists(st.floats(0.0, 1e4), max_size=30), st.floats(0.0, 60), st.integers(31, 60))
def test_the_coming_epoch_is_always_among_them(epoch_seconds: list[float], minutes: float, most: int) -> None:
    fitting = epochs_that_fit(minutes, most, epoch_seconds)
    assert len(epoch_seconds) < fitting <= most
    if not minutes or not epoch_seconds:
        assert fitting == most


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 99)), max_size=9), st.integers(0, 99))
def test_a_plan_holds_from_its_first_step_to_the_next(plans: list[tuple[int, int]], step: int) -> None:
    budget, held, first = Budget(), [7] * 100, 0
    for length, epochs in plans:
        budget.begin(first, epochs)
        held[first:] = [epochs] * (100 - first)
        first += length
    assert budget.epochs(step, 7) == held[step]


def test_a_run_without_minutes_has_all_its_epochs(data: SmallData) -> None:
    trainer = started(data, "whole", with_sections(BASE, {}))
    steps = len(train(trainer)) // MOST
    assert planned(trainer) == [MOST] * MOST
    assert trainer.total_steps == MOST * steps


@pytest.mark.parametrize(("share", "epochs"), [(1.0, 4), (0.5, 2), (0.01, 2), (50.0, MOST)])
def test_a_run_ends_when_its_minutes_are_over(data: SmallData, share: float, epochs: int) -> None:
    """`share`: of four epochs' seconds."""
    once = started(data, f"once-{share}", with_sections(BASE, {"train": {"epochs": 1}}))
    train(once)
    an_epoch = once.progress.budget.spent[0]
    trainer = started(data, f"timed-{share}", timed(4 * share * an_epoch))
    reports = []
    losses = train(trainer, on_epoch=reports.append)
    steps = len(losses) // epochs
    assert planned(trainer) == [MOST] + [epochs] * (epochs - 1)
    assert [(report.epoch, report.epochs) for report in reports] == [
        (epoch, MOST if not epoch else epochs) for epoch in range(epochs)
    ]
    assert json.loads(storage.read_bytes(trainer.run.finished)) == {"step": epochs * steps, "epochs": epochs}
    # Rates have come down to their end.
    rates = [line["encoder_lr"] for line in read_metrics(trainer.run) if line["kind"] == "train"]
    assert len(rates) == len(losses)
    full = trainer.recipe.encoder.lr
    assert rates[-1] < 0.1 * full
    assert rates == pytest.approx([full * trainer.rate_factor(step) for step in range(epochs * steps)])


def test_a_resumed_run_keeps_to_what_was_decided(data: SmallData, seconds: SimpleNamespace) -> None:
    once = started(data, "pace", with_sections(BASE, {"train": {"epochs": 1}}))
    steps = len(train(once))
    recipe = timed(6 * once.progress.budget.spent[0])
    for stop in (2, steps, steps + 1, 3 * steps - 1, 3 * steps + 5):
        killed = started(data, f"killed-{stop}", recipe)
        with pytest.raises(Killed):
            train(killed, stop)
        # What is left is done half as fast, so that fewer epochs fit.
        seconds.pace = 2.0
        resumed = Trainer.resume(data.layout.root, killed.run.root, recipe, silent)
        losses = train(resumed)
        seconds.pace = 0.3
        decided = planned(resumed)
        assert decided[-1] < 6 or stop == 3 * steps + 5
        # The same decisions, on a machine that is faster than either.
        again = RunLayout(f"memory://budget/again-{stop}")
        for epoch in range(len(decided)):
            storage.write_bytes(again.adoption(epoch), storage.read_bytes(killed.run.adoption(epoch)))
        other = Trainer.start(data.layout.root, again.root, recipe, silent)
        whole = train(other)
        seconds.pace = 1.0
        assert planned(other) == decided
        assert whole[-len(losses) :] == losses
        assert len(set(decided)) > 1


def test_seconds_are_kept_only_where_they_decide() -> None:
    """Without minutes two runs of the same recipe have the same checkpoints, to the bit."""
    progress = Progress(epoch=1, step=3, global_step=8)
    progress.budget.begin(5, 4)
    progress.budget.spend(2.5)
    assert Progress.of(json.loads(json.dumps(progress.state(timed=True)))) == progress
    plain = Progress.of(json.loads(json.dumps(progress.state(timed=False))))
    assert plain == Progress(epoch=1, step=3, global_step=8)
    plain.budget.spend(2.0)  # on with an epoch that another process began
    assert plain.budget.epochs(8, MOST) == MOST


def test_a_curriculum_needs_a_known_end() -> None:
    with pytest.raises(InputError, match=r"train\.minutes = 5 leaves the number of epochs open"):
        load_recipe(RECIPES["curriculum"], ["train.minutes=5"])
