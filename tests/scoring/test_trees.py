"""Boosted trees: scikit-learn's log odds in NumPy, rows apart from each other, terms that sum up, and broken files."""

import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import HistGradientBoostingClassifier
from threadpoolctl import threadpool_limits

from schemas.errors import InputError
from scoring.trees import Trees

COLUMNS = ("score", "votes", "prior", "words")


def made(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Columns with ties, missing and infinite values, one that is constant, and labels that depend on them."""
    draw = np.random.default_rng(seed)
    x = np.stack([draw.normal(size=rows), draw.integers(0, 4, rows), np.ones(rows), draw.normal(size=rows)], axis=1)
    right = np.nan_to_num(x[:, 0] * x[:, 1]) + draw.normal(size=rows) > 0.5
    right[:2] = False, True
    x[draw.random(rows) < 0.2, 0] = np.nan
    x[right & (draw.random(rows) < 0.7), 3] = np.nan  # a split of NaN from all others has an infinite threshold
    x[draw.random(rows) < 0.05, 1] = draw.choice([np.inf, -np.inf])
    x[0, [0, 3]] = 0  # scikit-learn fails for a column that is missing in all rows
    return x, right


@pytest.fixture(scope="module")
def trees() -> Trees:
    return Trees.fit(COLUMNS, *made(600))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(2, 300), count=st.integers(1, 6), leaves=st.integers(2, 64))
def test_the_log_odds_are_those_of_scikit_learn(seed: int, rows: int, count: int, leaves: int) -> None:
    x, right = made(rows, seed)
    model = HistGradientBoostingClassifier(
        max_iter=count, max_leaf_nodes=leaves, min_samples_leaf=1, early_stopping=False, max_bins=50
    )
    trees = Trees.from_sklearn(COLUMNS, model.fit(x, right))
    others = made(200, seed + 1)[0]
    others[::3, 2] = np.nan  # missing here, but not in the training rows
    thresholds = trees.threshold[np.abs(trees.threshold) < 1e300]  # without those that stand for infinite ones
    at_thresholds = np.concatenate([thresholds, np.nextafter(thresholds, np.inf)])[:, None].repeat(len(COLUMNS), axis=1)
    asked = np.concatenate([x, others, at_thresholds])
    found = Trees.from_json(json.loads(json.dumps(trees.as_json())))(asked)
    np.testing.assert_allclose(found, model.decision_function(asked), rtol=0, atol=1e-12)
    terms = trees.contributions(asked)
    assert terms.shape == (len(asked), len(COLUMNS) + 1)
    np.testing.assert_allclose(terms.sum(axis=1), found, rtol=0, atol=1e-12)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_rounding_of_a_row_that_was_fitted_decides_nothing(seed: int) -> None:
    x, right = made(400, seed)
    model = Trees.fit(COLUMNS, x, right)
    values = [np.unique(column[~np.isnan(column)]) for column in np.clip(x, -1e300, 1e300).T]
    inner = np.flatnonzero(model.feature >= 0)
    assert not any(model.threshold[node] in values[model.feature[node]] for node in inner)
    np.testing.assert_array_equal(model(x * (1 + 1e-9)), model(x))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trees, "_between", lambda trees, x: trees)
        np.testing.assert_array_equal(Trees.fit(COLUMNS, x, right)(x), model(x))


def test_a_row_has_the_same_bits_whatever_the_other_rows_are(trees: Trees) -> None:
    x = made(1100, seed=1)[0]
    found = trees(x)
    assert found.tobytes() == np.concatenate([trees(row[None]) for row in x]).tobytes()
    assert found.tobytes() == np.concatenate([trees(x[:700]), trees(np.asfortranarray(x[700:]))]).tobytes()
    assert trees(x[:0]).shape == (0,)
    with pytest.raises(ValueError, match="zip"):
        trees(x[:, :3])


def test_any_number_of_threads_fits_the_same_trees() -> None:
    data = *made(3000), (2, 4)  # few splits: on busy cores, each waits for the slower thread
    fitted = []
    for threads in (1, 2):
        with threadpool_limits(threads, user_api="openmp"):
            fitted.append(json.dumps(Trees.fit(COLUMNS, *data).as_json()))
    assert fitted[0] == fitted[1]


def test_terms_name_the_columns_that_matter(trees: Trees) -> None:
    """A column without a split has no term; a training set's terms of a tree sum to zero beside the constant."""
    x, right = made(600)
    terms = trees.contributions(x)
    assert not terms[:, 2].any()
    model = HistGradientBoostingClassifier(max_iter=1, early_stopping=False).fit(x, right)
    assert abs(Trees.from_sklearn(COLUMNS, model).contributions(x)[:, :-1].sum()) < 1e-9
    odds = trees(x)
    assert odds[right].mean() > 1 > -1 > odds[~right].mean()


@pytest.mark.parametrize("value", [0, np.nan, np.inf])
def test_trees_without_a_split_are_a_constant(value: float) -> None:
    trees = Trees.fit(COLUMNS, np.full((8, 4), value), np.arange(8) < 4)
    asked = np.array([[0, 1, np.nan, -np.inf]])
    assert trees(asked) == [0]
    assert not trees.contributions(asked).any()


def chain(leaves: int) -> dict:
    """The JSON of a tree whose left children are leaves."""
    feature = [0, -1] * (leaves - 1) + [-1]
    count = [each for left in range(leaves, 1, -1) for each in (left, 1)] + [1]
    numbers = [float(node // 2) for node in range(len(feature))]
    nodes = {"feature": feature, "threshold": numbers, "value": numbers, "missing_left": [False] * len(feature)}
    return {"columns": ["a"], **nodes, "count": count, "bias": 0.5}


def test_a_mask_has_64_leaves() -> None:
    trees = Trees.from_json(chain(64))
    asked = np.append(np.arange(70), np.nan)[:, None]
    assert trees(asked).tolist() == [0.5 + min(number, 63) for number in range(70)] + [63.5]
    with pytest.raises(ValueError, match="more than 64"):
        Trees.from_json(chain(65))


@pytest.mark.parametrize(
    "change",
    [
        {"feature": [0, -1, 0]},  # ends before its children
        {"feature": [-1, 0, -1]},
        {"feature": [1, -1, -1]},  # there is one column
        {"feature": [-2, -1, -1]},
        {"feature": [0.0, -1.0, -1.0]},
        {"threshold": [float("inf"), 0, 0]},
        {"threshold": ["1", "1", "1"]},
        {"threshold": [1.0, 2.0]},
        {"value": [0, float("nan"), 1]},
        {"value": 3},
        {"value": [[0, 1], 2, 3]},
        {"missing_left": [0, 0, 0]},
        {"count": [2, 2, 0]},
        {"count": [3, 1, 1]},
        {"bias": float("inf")},
        {"bias": None},
        {"columns": ["a", "a"]},
        {"columns": [1]},
        {key: [] for key in ("feature", "threshold", "value", "missing_left", "count")},
    ],
)
def test_inconsistent_trees_are_refused(change: dict) -> None:
    whole = chain(2)
    assert Trees.from_json(whole).as_json() == whole
    for body in ({**whole, **change}, {key: whole[key] for key in whole if key not in change}, [whole]):
        with pytest.raises(ValueError):
            Trees.from_json(body)


def test_what_cannot_be_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    for right in (np.zeros(9, bool), np.ones(9, bool)):
        with pytest.raises(InputError, match="of 9 labels are correct"):
            Trees.fit(COLUMNS, np.zeros((9, 4)), right)
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(InputError, match="need scikit-learn"):
        Trees.fit(COLUMNS, np.zeros((2, 4)), np.array([False, True]))
