"""The sampler as the loop uses it: what it finds, when it hashes again, and that it resumes exactly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.ragged import Ragged
from tests.trainer.negatives.label_vectors import LabelVectors
from trainer.negatives.lsh import GROWTH, HashedNegatives, is_due
from trainer.negatives.lsh_section import LshSection

LABELS, DIMENSION = 300, 16
OPTIONS = LshSection(bits=3, tables=6, capacity=8, every=3)


def vectors(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((LABELS, DIMENSION)).astype(np.float32)


def built(options: LshSection, weight: np.ndarray, seed: int = 4) -> HashedNegatives:
    sampler = HashedNegatives(options, LabelVectors(weight), seed)
    sampler.start()
    return sampler


def batch(step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng([1, step])
    counts = draw.integers(0, 4, 10)
    positives = np.concatenate([draw.choice(LABELS, n, replace=False) for n in counts])
    return draw.standard_normal((10, DIMENSION)), positives, np.concatenate([[0], np.cumsum(counts)])


def trained(sampler: HashedNegatives, weight: np.ndarray, steps: range) -> list[tuple[np.ndarray, ...]]:
    """Each step's negatives, while their rows and the positives' change."""
    negatives = []
    for step in steps:
        x, positives, offsets = batch(step)
        labels, starts = sampler.sample(x, Ragged(positives, offsets), epoch=1, step=step)
        negatives.append((labels, starts))
        touched = np.union1d(labels, positives)
        weight[touched] += 0.3 * np.random.default_rng([2, step]).standard_normal((len(touched), DIMENSION))
        sampler.touch(touched)
        sampler.after_step(step + 1, epoch=1, step=step)
    return negatives


@pytest.mark.parametrize("query", ["embedding", "label"])
@pytest.mark.parametrize("family", ["simhash", "dwta"])
def test_a_run_that_is_cut_off_goes_on_with_the_same_negatives(family: str, query: str) -> None:
    options = OPTIONS.model_copy(update={"family": family, "query": query, "hard": 20})
    weight = vectors(0)
    whole = built(options, weight)
    expected = trained(whole, weight, range(14))
    weight = vectors(0)
    first = built(options, weight)
    negatives = trained(first, weight, range(7))
    state = {name: array.copy() for name, array in first.state().items()}
    second = HashedNegatives(options, LabelVectors(weight), 4)
    second.load(state)
    negatives += trained(second, weight, range(7, 14))
    for step, expected_step in zip(negatives, expected, strict=True):
        for array, expected_array in zip(step, expected_step, strict=True):
            np.testing.assert_array_equal(array, expected_array)
    for name, array in whole.state().items():
        np.testing.assert_array_equal(second.state()[name], array)


@pytest.mark.parametrize("family", ["simhash", "dwta"])
def test_touched_rows_hashed_again_are_a_rebuild_and_the_others_stay(family: str) -> None:
    options = OPTIONS.model_copy(update={"family": family, "capacity": LABELS})  # nothing overflows
    weight = vectors(0)
    sampler = built(options, weight)
    stale = sampler.tables.codes.copy()
    weight[:200] = vectors(1)[:200]
    touched = np.array([5, 5, 9, 120, 0])
    sampler.touch(touched)
    sampler.touch(np.arange(30, 60))
    assert sampler.rehash(epoch=0, step=0) == 34
    assert len(sampler.touched) == 0
    again = np.union1d(touched, np.arange(30, 60))
    rebuilt = built(options, weight).tables
    np.testing.assert_array_equal(sampler.tables.codes[again], rebuilt.codes[again])
    rest = np.setdiff1d(np.arange(LABELS), again)
    np.testing.assert_array_equal(sampler.tables.codes[rest], stale[rest])
    sampler.touch(np.arange(LABELS))
    sampler.rehash(epoch=0, step=1)
    np.testing.assert_array_equal(np.sort(sampler.tables.arrays.slots), np.sort(rebuilt.arrays.slots))


def test_negatives_are_no_positives_and_near_the_query() -> None:
    weight = vectors(3)
    sampler = built(OPTIONS.model_copy(update={"family": "simhash", "bits": 4, "capacity": 64}), weight)
    _, positives, offsets = batch(0)
    x = weight[:10]
    labels, starts = sampler.sample(x, Ragged(positives, offsets), epoch=0, step=0)
    scores, sampled = x @ weight.T, np.zeros((10, LABELS), bool)
    for query in range(10):
        negatives = labels[starts[query] : starts[query + 1]]
        assert len(np.unique(negatives)) == len(negatives)
        assert not np.isin(negatives, positives[offsets[query] : offsets[query + 1]]).any()
        assert query in negatives or query in positives[offsets[query] : offsets[query + 1]]  # it collides with itself
        sampled[query, negatives] = True
    assert scores[sampled].mean() > scores[~sampled].mean() + 1


def test_a_label_finds_its_like_from_the_code_that_it_lies_under() -> None:
    weight = vectors(3)
    sampler = built(OPTIONS.model_copy(update={"query": "label", "hard": 0}), weight)
    positives, offsets = np.array([7, 40]), np.array([0, 1, 1, 2])
    labels, starts = sampler.sample(np.zeros((3, DIMENSION)), Ragged(positives, offsets), epoch=0, step=0)
    assert starts[1] == starts[2]  # the second query has no positive
    for query, label in ((0, 7), (2, 40)):
        negatives = labels[starts[query] : starts[query + 1]]
        assert label not in negatives
        same = (sampler.tables.codes == sampler.tables.codes[label]).any(1)
        assert same[negatives].all()


@pytest.mark.parametrize("query", ["embedding", "label"])
def test_all_is_the_union_of_the_buckets_of_every_table(query: str) -> None:
    weight = vectors(3)
    options = OPTIONS.model_copy(update={"query": query, "hard": "all", "capacity": LABELS, "width": 4, "bits": 2})
    sampler = built(options, weight)
    x, positives, offsets = batch(2)
    some = np.diff(offsets) > 0
    first = positives[offsets[:-1][some]]
    single = Ragged.from_counts(first, some.astype(np.int64))  # one positive a query, which stands for it
    labels, starts = sampler.sample(x, single, epoch=0, step=0)
    hashed = sampler.hashes.codes(x.astype(np.float32))
    if query == "label":
        hashed[some] = sampler.tables.codes[first]
    for row in np.flatnonzero(some):
        union = np.flatnonzero((sampler.tables.codes == hashed[row]).any(1))
        assert sorted(labels[starts[row] : starts[row + 1]]) == sorted(
            set(union) - set(single.slice(row, row + 1).values)
        )


def test_a_limit_stops_at_a_part_of_the_union() -> None:
    x, positives, offsets = batch(1)
    weight, known = vectors(3), Ragged(positives, offsets)
    few, every = (built(OPTIONS.model_copy(update={"hard": hard}), weight) for hard in (4, "all"))
    part, union = (sampler.sample(x, known, epoch=0, step=0) for sampler in (few, every))
    assert (part.counts == np.minimum(union.counts, 4)).all()
    assert union.contains(part.padded())[part.padded() >= 0].all()


def test_tables_of_bins_of_eight_are_bounded_by_their_bytes() -> None:
    assert LshSection(hard="all", width=8, bits=6, tables=50, capacity=16).buckets == 1 << 18
    with pytest.raises(ValidationError, match=r"262,144 buckets .* lower negatives\.lsh\.capacity"):
        LshSection(hard="all", width=8, bits=6, tables=50, capacity=128)
    with pytest.raises(ValidationError, match="more than the limit of 4"):
        LshSection(hard=10, family="simhash", bits=20, tables=50)


@given(st.integers(1, 60), st.integers(0, 40))
def test_rows_are_hashed_again_after_steps_that_grow_by_a_factor(every: int, times: int) -> None:
    steps = int(every * times * GROWTH)
    due = [step for step in range(1, steps + 1) if is_due(step, every)]
    # Where the sum of the intervals says, rounded up to a step.
    sums = np.cumsum(every * GROWTH ** np.arange(len(due) + 1.0))
    assert (np.abs(np.array(due) - np.ceil(sums[: len(due)] - 1e-6)) <= 1).all()
    assert sums[-1] > steps - 1
    assert not is_due(0, every)


def test_a_state_of_other_tables_is_refused() -> None:
    sampler = built(OPTIONS, vectors(0))
    other = built(OPTIONS.model_copy(update={"tables": 5}), vectors(0))
    with pytest.raises(ValueError, match="codes are"):
        other.load(sampler.state())
