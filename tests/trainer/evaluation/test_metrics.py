"""Metrics against napkinXC, and against the stated formulas in plain Python."""

import math

import napkinxc.metrics as napkinxc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError
from schemas.ragged import Ragged
from tests.trainer.evaluation.rankings import Case, cases
from trainer.evaluation.evaluate import inverse_propensity
from trainer.evaluation.metrics import Metrics

KS = (1, 3, 5, 10)
MEANS = ("P", "R", "F1", "nDCG", "nDCG-all")


def measure(case: Case, weights: np.ndarray | None = None) -> dict[str, float]:
    metrics = Metrics(KS, weights)
    metrics.update(case.top, Ragged(case.values, case.offsets))
    return metrics.result()


def weigh(case: Case) -> np.ndarray:
    return inverse_propensity(case.frequency, case.points, 0.55, 1.5)


def formulas(case: Case, q: np.ndarray) -> dict[str, float]:
    """The formulas of the module, one point and one rank at a time."""
    result = {}
    for k in KS:
        sums = dict.fromkeys((*MEANS, "PSP", "PSP best", "PSnDCG", "PSnDCG best"), 0.0)
        for positives, predicted in zip(case.positives, case.predicted, strict=True):
            best = sorted((q[label] for label in positives), reverse=True)
            ideal = sum(1 / math.log2(r + 1) for r in range(1, min(k, len(positives)) + 1))
            ideal_of_all = sum(1 / math.log2(r + 1) for r in range(1, len(positives) + 1))
            for r in range(1, k + 1):
                label = predicted[r - 1] if r <= len(predicted) else None
                if label in positives:
                    sums["P"] += 1 / k
                    sums["R"] += 1 / len(positives)
                    sums["F1"] += 2 / (min(k, len(predicted)) + len(positives))
                    sums["nDCG"] += 1 / math.log2(r + 1) / ideal
                    sums["nDCG-all"] += 1 / math.log2(r + 1) / ideal_of_all
                    sums["PSP"] += q[label]
                    sums["PSnDCG"] += q[label] / math.log2(r + 1) / ideal
                if r <= len(best):
                    sums["PSP best"] += best[r - 1]
                    sums["PSnDCG best"] += best[r - 1] / math.log2(r + 1) / ideal
        for name in MEANS:
            result[f"{name}@{k}"] = 100 * sums[name] / len(case.positives)
        for name in ("PSP", "PSnDCG"):
            result[f"{name}@{k}"] = 100 * sums[name] / sums[f"{name} best"] if sums[f"{name} best"] else 0.0
    return result


@given(cases())
def test_equals_the_stated_formulas(case: Case) -> None:
    weights = weigh(case)
    assert measure(case, weights) == pytest.approx(formulas(case, weights), rel=1e-5)


@given(cases())
def test_equals_napkinxc(case: Case) -> None:
    # napkinXC divides by zero where no point has a positive; we count that as 0.
    case.positives.append([0])
    case.predicted.append([])
    weights, k = weigh(case), max(KS)
    peer = {
        "P": napkinxc.precision_at_k(case.positives, case.predicted, k=k),
        "R": napkinxc.recall_at_k(case.positives, case.predicted, k=k, zero_division=0),
        "nDCG": napkinxc.ndcg_at_k(case.positives, case.predicted, k=k, zero_division=0),
        "PSP": napkinxc.psprecision_at_k(case.positives, case.predicted, weights, k=k, normalize=True),
        "PSnDCG": napkinxc.psndcg_at_k(case.positives, case.predicted, weights, k=k, normalize=True, zero_division=0),
    }
    expected = {f"{name}@{k}": 100 * values[k - 1] for name, values in peer.items() for k in KS}
    found = measure(case, weights)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@given(cases(), st.integers(1, 5))
def test_batches_of_any_size_give_the_same(case: Case, size: int) -> None:
    weights = weigh(case)
    metrics = Metrics(KS, weights)
    for start in range(0, len(case.positives), size):
        # Offsets of a slice begin where the slice does, as those of Arrow do.
        metrics.update(case.top[start : start + size], Ragged(case.values, case.offsets[start : start + size + 1]))
    assert metrics.result() == pytest.approx(measure(case, weights), rel=1e-6)


def test_no_propensities_no_propensity_scored_metrics() -> None:
    assert set(measure(Case([[0]], [[0]], np.array([1]), 3))) == {f"{m}@{k}" for m in MEANS for k in KS}


@pytest.mark.parametrize("ks", [(), (0, 1)])
def test_impossible_ks_are_refused(ks: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="at least 1"):
        Metrics(ks)


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(InputError, match="Is the split empty"):
        Metrics().result()


def test_a_repeated_prediction_is_refused() -> None:
    with pytest.raises(InputError, match=r"row 1 .* repeats"):
        Metrics().update(np.array([[1, 2, -1, -1], [3, 1, 0, 3]]), Ragged(np.array([3]), np.array([0, 0, 1])))


@pytest.mark.parametrize(("top", "positive"), [(5, 0), (0, 5)])
def test_a_label_without_propensity_is_refused(top: int, positive: int) -> None:
    with pytest.raises(InputError, match=r"label 5 .* \[0, 5\)"):
        Metrics(inverse_propensity=np.ones(5)).update(np.array([[top]]), Ragged(np.array([positive]), np.array([0, 1])))
