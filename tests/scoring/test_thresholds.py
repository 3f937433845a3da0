"""Thresholds against their definition, score by score."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError
from schemas.ragged import Ragged
from scoring.calibration import ScoredPredictions
from trainer.inputs import Inputs


@given(
    pairs=st.lists(st.tuples(st.integers(-4, 4), st.booleans()), max_size=30),
    precision=st.sampled_from([0.1, 0.5, 2 / 3, 0.9, 1.0]),
)
def test_the_lowest_score_from_which_on_enough_is_right(pairs: list[tuple[int, bool]], precision: float) -> None:
    scores = np.array([score for score, _ in pairs], np.float32)
    hits = np.array([hit for _, hit in pairs], bool)
    good = [t for t in np.unique(scores) if hits[scores >= t].mean() >= precision]
    ranked, ids = ScoredPredictions(), np.arange(len(scores))
    ranked.collect(ids[:, None], scores[:, None], Ragged.from_counts(ids[hits], hits.astype(np.int64)), Inputs())
    ranked.collect(
        np.full((9, 1), -1),
        np.zeros((9, 1)),
        Ragged(np.arange(50 - hits.sum()), np.minimum(np.arange(10) * 99, 50 - hits.sum())),
        Inputs(),
    )
    thresholds = ranked.thresholds([precision])
    if not good:
        assert thresholds == []
        return
    (threshold,) = thresholds
    assert threshold.score == good[0]
    assert threshold.reached == pytest.approx(hits[scores >= good[0]].mean())
    assert threshold.recall == pytest.approx(hits[scores >= good[0]].sum() / 50)
    assert threshold.predictions == pytest.approx((scores >= good[0]).sum() / (len(scores) + 9))


def test_batches_are_one_ranking_and_pads_are_none() -> None:
    ranked = ScoredPredictions()
    positives = Ragged(np.array([3, 2]), np.array([0, 1, 2]))
    ranked.collect(np.array([[3, 1], [2, -1]]), np.array([[5.0, 1.0], [4.0, -np.inf]]), positives, Inputs())
    ranked.collect(np.array([[0, 7]]), np.array([[3.0, 2.0]]), Ragged(np.array([7, 8]), np.array([0, 2])), Inputs())
    assert (ranked.queries, ranked.positives) == (3, 4)
    exact, most = ranked.thresholds([1.0, 0.75])
    assert (exact.score, exact.recall) == (4.0, 0.5)
    assert (most.score, most.recall) == (2.0, 0.75)
    assert most.predictions == pytest.approx(4 / 3)


def test_known_labels_count_as_if_they_did_not_exist() -> None:
    draw = np.random.default_rng(0)
    top, scores = draw.permuted(np.tile(np.arange(12), (40, 1)), axis=1), -np.sort(draw.normal(size=(40, 12)))
    positives = Ragged.from_counts(draw.integers(12, size=80), np.full(40, 2))
    known = np.array([1, 5, 6])
    one, other = ScoredPredictions(known_labels=known.tolist()), ScoredPredictions()
    one.collect(top[:, :10], scores[:, :10], positives, Inputs())
    for row in range(40):
        kept = ~np.isin(top[row, :10], known)
        wanted = positives.take(np.array([row]))
        wanted = wanted.keep(~np.isin(wanted.entries, known))
        other.collect(top[row : row + 1, :10][:, kept], scores[row : row + 1, :10][:, kept], wanted, Inputs())
    assert (one.queries, one.positives) == (other.queries, other.positives)
    for first, second in zip(one.pairs(), other.pairs(), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("precision", [0.0, 1.5, -1.0])
def test_a_precision_is_a_share(precision: float) -> None:
    with pytest.raises(InputError, match=r"expected a fraction in \(0, 1\]"):
        ScoredPredictions().thresholds([0.5, precision])


def test_nothing_scored() -> None:
    with pytest.raises(InputError, match="the split is empty"):
        ScoredPredictions().thresholds([0.5])
