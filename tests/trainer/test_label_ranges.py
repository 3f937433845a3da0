"""Ranges of labels of equal work: they cover all labels, none has too many, and none works more than it has to."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainer.sizes
from tests.builders import build_data
from trainer.methods.recipe import Recipe
from trainer.sizes import MOST_LABELS, balanced_bounds, cumulated, label_bounds

frequencies = st.lists(st.sampled_from([0, 1, 1, 2, 5, 40, 1000]), min_size=1, max_size=60).map(
    lambda values: np.array(values, np.int64)
)


def work_of(bounds: list[int], work: np.ndarray) -> np.ndarray:
    """Return the work of each range, `work` [L] being that of each label."""
    return np.diff(np.concatenate([[0.0], np.cumsum(work)])[bounds])


def least_possible(work: np.ndarray, ranks: int, most_labels: int) -> float:
    """Return the greatest work of a range in the best cut, by trying all: of labels [0, n) in r ranges, r by r."""
    sums = np.concatenate([[0.0], np.cumsum(work)])
    best = np.where(np.arange(len(sums)) == 0, 0.0, np.inf)
    for _ in range(ranks):
        best = np.array(
            [
                min(
                    (max(best[low], sums[n] - sums[low]) for low in range(max(0, n - most_labels), n)),
                    default=np.inf,
                )
                for n in range(len(sums))
            ]
        )
    return float(best[-1])


@given(frequencies, st.integers(2, 8), st.floats(0.05, 20))
def test_no_range_works_more_than_in_the_best_cut(frequency: np.ndarray, ranks: int, uniform: float) -> None:
    labels = len(frequency)
    ends, sums = cumulated(np.array_split(frequency, 3), labels)
    total = max(1, frequency.sum())
    bounds = balanced_bounds(ends, sums / total + uniform * ends / labels, ranks)
    work = frequency / total + uniform / labels
    if bounds is None:
        equal = [labels * rank // ranks for rank in range(ranks + 1)]
        assert labels < ranks or work_of(equal, work).max() <= 1.051 * work.sum() / ranks
        return
    assert bounds[0] == 0
    assert bounds[-1] == labels
    assert (np.diff(bounds) > 0).all()
    most_labels = -(-int(MOST_LABELS * labels) // ranks)
    assert np.diff(bounds).max() <= most_labels
    assert work_of(bounds, work).max() <= 1.001 * least_possible(work, ranks, most_labels)


def zipf(labels: int) -> np.ndarray:
    return (10 * labels / np.arange(1, labels + 1)).astype(np.int64)


@pytest.mark.parametrize(("random", "equal", "balanced"), [(40, 4.9, 1.26), (400, 1.5, 1.01)])
def test_labels_by_popularity_are_cut_by_their_work(random: int, equal: float, balanced: float) -> None:
    """The most work of 16 ranks over the mean, of 20 positives and hard negatives; few draws leave it to the memory."""
    labels, ranks, popular = 1_000_000, 16, 20
    frequency = zipf(labels)
    ends, sums = cumulated(np.array_split(frequency, 30), labels)
    assert len(ends) < 600_000
    bounds = balanced_bounds(ends, popular * sums / sums[-1] + random * ends / labels, ranks)
    assert bounds is not None
    work = popular * frequency / frequency.sum() + random / labels
    as_many = [labels * rank // ranks for rank in range(ranks + 1)]
    before, after = (work_of(cut, work).max() / work.sum() * ranks for cut in (as_many, bounds))
    assert before > equal
    assert after < balanced


def test_labels_in_any_order_are_cut_as_ever() -> None:
    frequency = np.random.default_rng(0).permutation(zipf(1_000_000) // 100 + 5)
    ends, sums = cumulated([frequency], len(frequency))
    assert balanced_bounds(ends, 5 * sums / sums[-1] + 400 * ends / len(frequency), 8) is None


def test_memory_does_not_grow_with_the_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.sizes, "_STRIDE", 8)
    monkeypatch.setattr(trainer.sizes, "_FREQUENT", 6)
    frequency = zipf(200_000)
    ends, sums = cumulated(np.array_split(frequency, 50), len(frequency))
    assert len(ends) < 2_000
    exact = np.concatenate([[0], np.cumsum(frequency)])
    np.testing.assert_array_equal(sums, exact[ends])
    error = np.abs(np.interp(np.arange(len(exact)), ends, sums) - exact).max()
    assert error < 0.02 * exact[-1]


def test_only_what_learns_rows_by_frequency_is_cut_by_work(tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data"), labels=40, rows={"train": 200}, popular=True)
    recipe = Recipe.model_validate({"negatives": {"random": 4, "hard": 2}})
    bounds = label_bounds(data.layout, recipe, 4)
    assert bounds is not None
    assert bounds[1] < 10
    assert label_bounds(data.layout, recipe, 1) is None
    assert label_bounds(data.layout, Recipe.model_validate({"method": "renee"}), 4) is None
    assert label_bounds(data.layout, Recipe.model_validate({"method": "dexml"}), 4) is None
