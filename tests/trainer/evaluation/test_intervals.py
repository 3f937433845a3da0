"""The bootstrap: known distributions, ratios of sums, and the same intervals again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError
from trainer.evaluation import metrics as intervals
from trainer.evaluation.metrics import Contributions, bootstrap, paired_difference


def test_a_mean_gets_the_normal_interval() -> None:
    points = np.random.default_rng(0).normal(0.4, 0.2, 2000).astype(np.float32)
    low, high = bootstrap({"m": Contributions(points, None)})["m"]
    half = 1.96 * points.std() / np.sqrt(len(points))
    assert (low, high) == pytest.approx((100 * (points.mean() - half), 100 * (points.mean() + half)), abs=10 * half)


def test_a_ratio_of_sums_gets_its_delta_interval() -> None:
    generator = np.random.default_rng(1)
    achievable = generator.uniform(1, 9, 2000)
    # What is achieved moves with what is achievable: the interval of the mean of either is several times as wide.
    achieved = achievable * (0.6 + generator.normal(0, 0.05, 2000))
    ratio = achieved.sum() / achievable.sum()
    half = 1.96 * np.std(achieved - ratio * achievable) / achievable.mean() / np.sqrt(2000)
    low, high = bootstrap({"r": Contributions(achieved, achievable)})["r"]
    assert low == pytest.approx(100 * (ratio - half), abs=10 * half)
    assert high == pytest.approx(100 * (ratio + half), abs=10 * half)


def test_intervals_cover_as_often_as_they_say() -> None:
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(300):
        hits = (generator.random(100) < 0.4).astype(np.float32)
        low, high = bootstrap({"P@1": Contributions(hits, None)}, resamples=200)["P@1"]
        covered += low <= 40 <= high
    assert 0.9 <= covered / 300 <= 0.99


def test_same_intervals_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"m": Contributions(np.random.default_rng(3).random(50), None)}
    whole = bootstrap(parts, resamples=70)
    monkeypatch.setattr(intervals, "_WEIGHTS", 333)
    assert bootstrap(parts, resamples=70)["m"] == pytest.approx(whole["m"], rel=1e-12)


def test_points_without_positives_do_not_break_a_ratio() -> None:
    part = Contributions(np.array([0.0, 1.0]), np.array([0.0, 2.0]))
    assert bootstrap({"r": part}, resamples=400)["r"] == (0, 50)


@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans())
def test_a_paired_difference_is_that_of_the_bootstrap_over_texts(seed: int, copies: int, is_ratio: bool) -> None:
    draw = np.random.default_rng(seed)
    texts = np.repeat(draw.permutation(400), copies)
    below = np.repeat(draw.uniform(1, 3, 400), copies) if is_ratio else None
    scores = np.repeat(draw.random((2, 400)), copies, axis=1) * (1 if below is None else below)
    ours, theirs = (Contributions(each, below) for each in scores)
    value, error = paired_difference([ours], [theirs], texts)
    low, high = bootstrap({"m": Contributions(scores[0] - scores[1], below)}, 400, texts)["m"]
    assert value == pytest.approx(intervals.value(ours) - intervals.value(theirs))
    assert 2 * 1.96 * error == pytest.approx(high - low, rel=0.25)
    # Copies of a text say nothing new, and two of the same metric weigh twice.
    assert error == pytest.approx(copies**0.5 * paired_difference([ours], [theirs])[1], rel=0.01)
    assert paired_difference([ours] * 2, [theirs] * 2, texts) == pytest.approx((2 * value, 2 * error))


def test_no_points_are_refused() -> None:
    with pytest.raises(InputError, match="no point"):
        bootstrap({"m": Contributions(np.zeros(0), None)})
