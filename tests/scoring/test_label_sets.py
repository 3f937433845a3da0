"""Figures of sets of labels against scikit-learn: means at every k and of any sets, and of each label."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.ragged import Ragged
from scoring.label_sets import CONFUSED, LabelSets
from tests.trainer.evaluation.rankings import Case, cases
from trainer.evaluation.metrics import Metrics

KS = (1, 3, 5)
metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is the reference (extra trainer)")


def indicators(rows: list[list[int]], labels: int) -> np.ndarray:
    return np.array([[label in row for label in range(labels)] for row in rows], dtype=int).reshape(len(rows), labels)


def expected(
    positives: list[list[int]], predicted: list[list[int]], average: str | None, labels: int = 0
) -> list[float]:
    # A column of zeros keeps the matrix a multilabel one. The macro mean is over the labels that occur.
    present = sorted({label for row in positives + predicted for label in row})
    if average == "macro" and not present:
        return [0.0] * 3
    width = 1 + max(labels, *present, 0, 1)
    *found, _ = metrics.precision_recall_fscore_support(
        indicators(positives, width),
        indicators(predicted, width),
        labels=present if average == "macro" else None,
        average=average,
        zero_division=0,
    )
    return [100 * value for value in found]


def collected(case: Case, scores: np.ndarray, size: int) -> LabelSets:
    sets = LabelSets(len(case.frequency))
    for start in range(0, len(case.top), size):
        rows = slice(start, start + size)
        positives = Ragged(case.values, case.offsets[start : start + size + 1])
        sets.collect(case.top[rows], scores[rows].astype(np.float32), positives)
    return sets


def draw_scores(data: st.DataObject, top: np.ndarray) -> np.ndarray:
    """Draw scores that fall with the rank, with many equal ones; the score of a pad does not count."""
    some = st.lists(st.sampled_from([-1.5, -1.0, 0.0, 0.25, 0.5, 1.0]), min_size=top.size, max_size=top.size)
    return np.where(top < 0, np.inf, -np.sort(-np.array(data.draw(some), float).reshape(top.shape), axis=1))


def draw_sets(data: st.DataObject, top: np.ndarray) -> np.ndarray:
    flags = data.draw(st.lists(st.booleans(), min_size=top.size, max_size=top.size))
    return np.array(flags, bool).reshape(top.shape) & (top >= 0)


@given(case=cases(), data=st.data(), size=st.integers(1, 5))
def test_means_equal_scikit_learn(case: Case, data: st.DataObject, size: int) -> None:
    top, per_query = case.top, Metrics(KS)
    sets, chosen = collected(case, draw_scores(data, top), size), draw_sets(data, top)
    per_query.update(top, Ragged(case.values, case.offsets))
    at_k = sets.at_k(KS)
    for k in KS:
        first = [row[:k] for row in case.predicted]
        for average in ("micro", "macro"):
            assert at_k[average][f"F1@{k}"] == pytest.approx(expected(case.positives, first, average)[2])
        f1 = expected(case.positives, first, "samples")[2]
        assert per_query.result()[f"F1@{k}"] == pytest.approx(f1, rel=1e-5)
    found = sets.averages(chosen)
    given_lists = [ids[mask].tolist() for ids, mask in zip(top, chosen, strict=True)]
    for average in ("samples", "micro", "macro"):
        values = [found[average][name] for name in ("precision", "recall", "F1")]
        assert values == pytest.approx(expected(case.positives, given_lists, average)), average
    assert found["predictions"] == pytest.approx(np.mean([*map(len, given_lists)]))


@given(case=cases(), data=st.data(), size=st.integers(1, 5), whole=st.booleans())
def test_each_label_equals_scikit_learn_and_a_loop(case: Case, data: st.DataObject, size: int, whole: bool) -> None:
    labels = len(case.frequency)
    if whole:  # a complete ranking
        case = case._replace(predicted=[data.draw(st.permutations(range(labels))) for _ in case.predicted])
    top, positives = case.top, case.positives
    scores, chosen = draw_scores(data, top), draw_sets(data, top)
    found = {k: v.to_pylist() for k, v in collected(case, scores, size).of_labels(chosen).items()}
    given_lists = [ids[mask].tolist() for ids, mask in zip(top, chosen, strict=True)]
    for name, values in zip(("precision", "recall", "F1"), expected(positives, given_lists, None, labels), strict=True):
        assert found[name] == pytest.approx(values[:labels])
    for label in range(labels):
        rows = [row for row, own in enumerate(positives) if label in own]
        places = [{int(each): place for place, each in enumerate(ids) if each >= 0} for ids in top]
        of = {row: float(scores[row, at[label]]) for row, at in enumerate(places) if label in at}
        missed = [row for row in rows if label not in given_lists[row]]
        wrong = [row for row, own in enumerate(given_lists) if label in own and row not in rows]
        assert found["support"][label] == len(rows)
        assert found["predicted"][label] == sum(label in own for own in given_lists)
        if rows:
            above = [[other for other in of if of[other] >= of[row]] for row in rows if row in of]
            precisions = [sum(other in rows for other in others) / len(others) for others in above]
            assert found["average_precision"][label] == pytest.approx(100 * sum(precisions) / len(rows))
            ranks = [places[row].get(label, np.inf) + 1 for row in rows]
            assert found["median_rank"][label] == np.median(ranks)
            if whole:
                truth, values = [row in rows for row in range(len(top))], [of[row] for row in range(len(top))]
                exact = metrics.average_precision_score(truth, values)
                assert found["average_precision"][label] == pytest.approx(100 * exact)
        else:
            assert found["average_precision"][label] is found["median_rank"][label] is None
        instead = Counter(other for row in missed for other in wrong_of(given_lists[row], positives[row])[:10])
        assert_most(found["missed_for"][label], found["missed_for_queries"][label], instead)
        others = Counter(
            other
            for row in wrong
            for other in positives[row]
            if other not in given_lists[row] and label in wrong_of(given_lists[row], positives[row])[:10]
        )
        assert_most(found["given_for"][label], found["given_for_queries"][label], others)
        lowest = max(missed, key=lambda row: (places[row].get(label, np.inf), -row), default=None)
        assert found["missed"][label] == lowest
        assert found["wrong"][label] == max(wrong, key=lambda row: (of[row], -row), default=None)


def wrong_of(given_list: list[int], positives: list[int]) -> list[int]:
    return [label for label in given_list if label not in positives]


def assert_most(ids: list[int], queries: list[int], counted: Counter[int]) -> None:
    most = sorted(counted.items(), key=lambda pair: (-pair[1], pair[0]))[:CONFUSED]
    assert [*zip(ids, queries, strict=True)] == most


def test_labels_of_the_means() -> None:
    """Worked by hand: label 9 never occurs and does not count; label 2 is only predicted, and counts as 0."""
    positives = Ragged(np.array([0, 1, 3]), np.array([0, 1, 3]))
    sets, top = LabelSets(10), np.array([[0, 2], [1, -1]])
    sets.collect(top, np.array([[0.9, 0.1], [0.5, 0]]), positives)
    assert sets.at_k([2]) == {"micro": {"F1@2": pytest.approx(200 / 3)}, "macro": {"F1@2": 50.0}}
    found = sets.averages(sets.rankings.scores >= 0.5)
    assert found["samples"] == pytest.approx({"precision": 100, "recall": 75, "F1": 250 / 3})
    assert found["macro"] == pytest.approx({"precision": 200 / 3, "recall": 200 / 3, "F1": 200 / 3})
