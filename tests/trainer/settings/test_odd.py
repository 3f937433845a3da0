"""Odd settings and losses: a line for each oddity that is planted, and none where nothing is odd."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import build_data
from tests.recipes import RECIPES
from tests.training import train, with_sections
from trainer.loop import LossWatch, Trainer
from trainer.methods.settling import DataStatistics, log_odds
from trainer.recipe_files import read_recipe
from trainer.settings.resolve import Resolved, odd_settings, resolve

SANE = DataStatistics(queries=200_000, labels=30_000, pairs=1_000_000, ngrams=700_000, tokens=20)


def odd(name: str, *overrides: str, facts: DataStatistics = SANE) -> list[str]:
    return [*odd_settings(Resolved.of(read_recipe(name, overrides), facts, name).recipe, facts)]


@pytest.mark.parametrize("name", RECIPES.values(), ids=RECIPES)
def test_no_recipe_is_odd(name: str) -> None:
    assert odd(name) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("refresh.start=9", "train.epochs=9"), ("negatives.hard has no effect", "refresh.start = 9")),
        (("classifier.initial_bias=-5",), ("initial_bias = -5 is", "above the prior of this data, -8.7")),
        (("classifier.initial_bias=-12",), ("initial_bias = -12 is", "below the prior")),
        (("order.batch=32768",), ("order.batch = 32768 gives only 7 steps in an epoch of 200,000 points",)),
    ],
)
def test_a_planted_oddity_has_a_line(overrides: tuple[str, ...], words: tuple[str, ...]) -> None:
    facts = replace(SANE, labels=20_000, pairs=int(200_000 * 20_000 / (1 + np.exp(8.7))))
    lines = odd("astra", "data.label_texts=false", *overrides, facts=facts)
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines[0]


def test_all_of_them_at_once_and_only_where_they_matter() -> None:
    planted = ("refresh.start=9", "train.epochs=9", "classifier.initial_bias=0", "order.batch=32768")
    assert len(odd("astra", *planted)) == 3
    assert odd("astra", "negatives.hard=0", "refresh.start=9", "train.epochs=9") == []
    assert odd("astra", "classifier.bias=false", "classifier.initial_bias=0") == []
    assert odd("astra", "loss.kind=softmax", "classifier.initial_bias=0") == []
    near = log_odds(SANE.prior)
    assert odd("astra", "data.label_texts=false", f"classifier.initial_bias={near + 0.9}") == []


def test_they_are_told_beside_the_settings() -> None:
    data = build_data("memory://odd/data", rows={"train": 90})
    lines = resolve("astra", ["classifier.initial_bias=-9", "order.batch=64"], data.layout.root).lines(data.layout.root)
    told = [line for line in lines if line.startswith("odd: ")]
    assert len(told) == 2  # the bias, and 120 rows make 2 steps
    assert "encoder.dimension = 256 (30 labels)" in lines
    assert any(line.startswith("negatives.pool = shared (each of 3,200 draws") for line in lines)
    assert resolve("astra", ["data.mix={train = 1.0, labels = 1.0}"], data.layout.root).lines(data.layout.root) == []


def jumps(losses: list[float]) -> list[int]:
    watch = LossWatch()
    return [step for step, loss in enumerate(losses) if watch.jumped(loss) is not None]


@given(st.integers(0, 2**32), st.floats(0.0, 0.2), st.floats(1e-3, 1e3))
def test_noise_and_a_falling_loss_are_no_jump(seed: int, noise: float, size: float) -> None:
    steps = np.arange(400)
    smooth = size * (0.1 + np.exp(-steps / 100))
    factors = np.exp(noise * np.random.default_rng(seed).standard_normal(400))
    assert jumps((smooth * factors).tolist()) == []


@given(st.integers(100, 350), st.floats(5, 1e6), st.integers(0, 2**32))
def test_a_jump_is_told_once_where_it_happens(step: int, times: float, seed: int) -> None:
    losses = np.exp(0.05 * np.random.default_rng(seed).standard_normal(400))
    losses[step:] *= times
    assert jumps(losses.tolist()) == [step + 2]


def test_a_batch_with_a_row_of_many_labels_is_no_jump() -> None:
    assert jumps([50.0 if step % 150 == 149 else 1.0 for step in range(900)]) == []


def test_sources_that_take_turns_are_no_jump() -> None:
    losses = [1.0 if step % 7 else 9.0 for step in range(500)]
    assert jumps(losses) == []


def test_a_jump_needs_steps_to_compare_with() -> None:
    assert jumps([1.0] * 50 + [100.0] * 30) == []
    watch = LossWatch()
    assert [watch.jumped(1.0) for _ in range(100)] == [None] * 100
    assert [watch.jumped(5.0) for _ in range(3)] == [None, None, 1.0]
    assert [watch.jumped(50.0) for _ in range(3)] == [None] * 3  # it begins anew


def test_a_run_tells_a_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rates that are far too high for a moment, as in the middle of a run that diverges."""
    data = build_data("memory://odd/jump", rows={"train": 64})
    base = {
        "order": {"batch": 8, "streams": 4, "threads": 0},
        "encoder": {"dimension": 4, "buckets": 64, "lr": 1e-3},
        "classifier": {"lr": 1e-3, "bias": True, "optimizer": "sgd"},
        "method": "renee",
        "train": {"epochs": 3, "final_lr": 1.0},
        "checkpoint": {"every_epochs": 0},
        "logging": {"tensorboard": False},
    }
    monkeypatch.setattr("trainer.loop._WINDOW", 12)
    factor = Trainer.rate_factor
    monkeypatch.setattr(Trainer, "rate_factor", lambda self, step: factor(self, step) * (1e6 if step == 17 else 1))
    said: list[str] = []
    train(Trainer.start(data.layout.root, "memory://odd/run", with_sections(base, {}), said.append))
    told = [line for line in said if line.startswith("odd: ")]
    assert len(told) == 1
    assert "odd: at step 20 the loss jumped from" in told[0]
