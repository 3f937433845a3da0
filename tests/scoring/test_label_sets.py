"""Precision, recall and F1 of sets of labels against scikit-learn, at every k and at a threshold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.ragged import Ragged
from scoring.label_sets import LabelSets
from tests.trainer.evaluation.rankings import Case, cases
from trainer.evaluation.metrics import Metrics

KS = (1, 3, 5)
metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is the reference (extra trainer)")


def indicators(rows: list[list[int]], labels: int) -> np.ndarray:
    return np.array([[label in row for label in range(labels)] for row in rows], dtype=int).reshape(len(rows), labels)


def expected(positives: list[list[int]], predicted: list[list[int]], average: str) -> list[float]:
    # A column of zeros keeps the matrix a multilabel one. The macro mean is over the labels that occur.
    labels = 1 + max((label for row in positives + predicted for label in row), default=0)
    present = sorted({label for row in positives + predicted for label in row})
    if average == "macro" and not present:
        return [0.0] * 3
    *found, _ = metrics.precision_recall_fscore_support(
        indicators(positives, labels + 1),
        indicators(predicted, labels + 1),
        labels=present if average == "macro" else None,
        average=average,
        zero_division=0,
    )
    return [100 * value for value in found]


@given(case=cases(), data=st.data(), size=st.integers(1, 5), threshold=st.sampled_from([-1.0, 0.0, 0.5, 9.0]))
def test_equals_scikit_learn(case: Case, data: st.DataObject, size: int, threshold: float) -> None:
    top, labels = case.top, len(case.frequency)
    some = st.sampled_from([-1.5, -1.0, 0.0, 0.25, 0.5, 1.0])  # scores that equal the threshold are common
    scores = np.array([data.draw(some) for _ in range(top.size)]).reshape(top.shape)
    scores = np.where(top < 0, np.inf, -np.sort(-scores, axis=1))  # the score of a pad does not count
    sets, per_query = LabelSets(labels, KS, threshold), Metrics(KS)
    for start in range(0, len(top), size):
        rows = slice(start, start + size)
        positives = Ragged(case.values, case.offsets[start : start + size + 1])
        sets.collect(top[rows], scores[rows].astype(np.float32), positives)
        per_query.update(top[rows], positives)
    report = sets.report()
    for k in KS:
        first = [row[:k] for row in case.predicted]
        for average in ("micro", "macro"):
            f1 = expected(case.positives, first, average)[2]
            assert report["averages"][average][f"F1@{k}"] == pytest.approx(f1)
        f1 = expected(case.positives, first, "samples")[2]
        assert per_query.result()[f"F1@{k}"] == pytest.approx(f1, rel=1e-5)
    at = report["at_threshold"]
    reached = [
        [label for label, score in zip(row[: max(KS)], own, strict=False) if score >= threshold]
        for row, own in zip(case.predicted, scores, strict=True)
    ]
    for average in ("samples", "micro", "macro"):
        found = [at[average][name] for name in ("precision", "recall", "F1")]
        assert found == pytest.approx(expected(case.positives, reached, average)), average
    assert at["predictions"] == pytest.approx(np.mean([*map(len, reached)]))
    assert at["cut_off"] == sum(len(row) == max(KS) for row in reached)


def test_labels_of_the_means() -> None:
    """Worked by hand: label 9 never occurs and does not count; label 2 is only predicted, and counts as 0."""
    positives = Ragged(np.array([0, 1, 3]), np.array([0, 1, 3]))
    sets = LabelSets(10, [2], threshold=0.5)
    sets.collect(np.array([[0, 2], [1, -1]]), np.array([[0.9, 0.1], [0.5, 0]]), positives)
    report = sets.report()
    assert report["averages"] == {"micro": {"F1@2": pytest.approx(200 / 3)}, "macro": {"F1@2": 50.0}}
    assert report["at_threshold"]["samples"] == pytest.approx({"precision": 100, "recall": 75, "F1": 250 / 3})
    assert report["at_threshold"]["macro"] == pytest.approx({"precision": 200 / 3, "recall": 200 / 3, "F1": 200 / 3})
