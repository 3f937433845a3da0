"""The classifier in scikit-learn's tools: their results are those of its own methods."""

import gc
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score, f1_score
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, MultiLabelBinarizer
from sklearn.utils import estimator_checks as checks
from sklearn.utils.validation import check_is_fitted, validate_data

from extremis import Classifier
from schemas.errors import InputError, TableError

TOPICS = ("ship storm sea", "river bank water", "dog cat pet", "car road wheel")
NAMES = np.array(["marine", "rivers", "animals", "traffic"])
SMALL: dict[str, Any] = {"set": {"train.epochs": 8, "encoder.dimension": 32}}


def make_texts(rows: int, seed: int = 0) -> tuple[list[str], np.ndarray]:
    """Return texts about one or two of TOPICS, and which, bool [rows, 4]."""
    draw = np.random.default_rng(seed)
    about = np.eye(len(TOPICS), dtype=bool)[draw.integers(0, 4, (rows, 2))].any(1)
    words = [" ".join([*(TOPICS[n] for n in np.flatnonzero(row)), "old new"]).split() for row in about]
    return [" ".join(draw.choice(some, 8)) for some in words], about


TEXTS, ABOUT = make_texts(120)
SINGLE = NAMES[ABOUT.argmax(1)]
LISTS = [NAMES[row].tolist() for row in ABOUT]


@pytest.fixture(scope="module")
def single() -> Classifier:
    return Classifier("random", **SMALL).fit(TEXTS, SINGLE)


@pytest.fixture(scope="module")
def lists() -> Classifier:
    return Classifier("random", **SMALL).fit(pd.Series(TEXTS), LISTS)


def test_one_label_for_each_text(single: Classifier) -> None:
    predicted, found = single.predict(TEXTS), single.predict_proba(np.array(TEXTS))
    assert single.classes_.tolist() == sorted(NAMES)
    assert single.score(TEXTS, SINGLE) == pytest.approx(accuracy_score(SINGLE, predicted))
    assert single.score(TEXTS, SINGLE) > 0.7
    assert found.shape == (120, 4)
    np.testing.assert_allclose(found.sum(1), 1)
    assert (single.classes_[found.argmax(1)] == predicted).all()


def test_lists_of_labels(lists: Classifier) -> None:
    predicted, found = lists.predict(TEXTS), lists.predict_proba(TEXTS)
    names = MultiLabelBinarizer(classes=sorted(NAMES))
    expected = f1_score(names.fit_transform(LISTS), names.fit_transform(predicted), average="micro")
    assert lists.score(TEXTS, LISTS) == pytest.approx(expected)
    assert lists.score(TEXTS, LISTS) > 0.8
    assert [*map(sorted, predicted)] == [lists.classes_[row >= 0.5].tolist() for row in found]


@pytest.mark.parametrize("form", [np.array, sp.csr_matrix, lambda matrix: pd.DataFrame(matrix, columns=NAMES)])
def test_a_matrix_is_answered_by_a_matrix(form: Any) -> None:
    labels = form(ABOUT.astype(int))
    fitted = Classifier("random", **SMALL).fit(TEXTS, labels)
    predicted = fitted.predict(TEXTS)
    assert sp.issparse(predicted) == sp.issparse(labels)
    dense = predicted.toarray() if sp.issparse(predicted) else predicted
    assert dense.shape == ABOUT.shape
    assert fitted.score(TEXTS, labels) == pytest.approx(f1_score(ABOUT, dense, average="micro"))
    assert fitted.score(TEXTS, labels) > 0.8
    assert ((fitted.predict_proba(TEXTS) >= 0.5) == dense).all()
    assert fitted.classes_.tolist() == (NAMES.tolist() if hasattr(labels, "columns") else [0, 1, 2, 3])


def test_many_labels_have_the_best_probabilities(lists: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = lists.predict_proba(TEXTS)
    monkeypatch.setattr("extremis.classifier._DENSE", 3)
    monkeypatch.setattr("extremis.classifier._BEST", 2)
    best = lists.predict_proba(TEXTS)
    assert sp.issparse(best)
    assert (best.getnnz(1) == 2).all()
    kept = best.toarray()
    np.testing.assert_array_equal(kept[kept > 0], whole[kept > 0])
    assert (kept.max(1) == whole.max(1)).all()


def test_a_pickle_holds_the_path(lists: Classifier, tmp_path: Path) -> None:
    kept = Classifier("random", **SMALL, folder=tmp_path / "fits").fit(TEXTS, SINGLE)
    written = pickle.dumps(kept)
    assert len(written) < 4096
    assert (pickle.loads(written).predict(TEXTS) == kept.predict(TEXTS)).all()
    (tmp_path / "code.py").write_text(
        "import pickle, sys\n"
        "model = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(model.predict(['ship storm']).tolist(), sorted({'sklearn', 'torch', 'scipy'} & {*sys.modules}))\n"
    )
    (tmp_path / "model.pickle").write_bytes(written)
    command = [sys.executable, tmp_path / "code.py", tmp_path / "model.pickle"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert told.stdout.strip() == f"{kept.predict(['ship storm']).tolist()} []"
    shutil.copytree(lists.export_, tmp_path / "other")
    shutil.rmtree(kept.export_)
    with pytest.raises(TableError, match="no table here"):
        pickle.loads(written)
    shutil.copytree(tmp_path / "other", kept.export_)
    with pytest.raises(InputError, match="another export than the one of this classifier"):
        pickle.loads(written)


def test_a_folder_of_its_own_lives_as_long_as_the_object() -> None:
    fitted = Classifier("random", **SMALL).fit(TEXTS[:40], SINGLE[:40])
    place = Path(fitted.export_)
    assert place.is_dir()
    del fitted
    gc.collect()
    assert not place.exists()


def test_probabilities_of_the_other_half() -> None:
    found = cross_val_predict(Classifier("random", **SMALL), TEXTS, SINGLE, cv=2, method="predict_proba")
    assert accuracy_score(SINGLE, np.unique(SINGLE)[found.argmax(1)]) > 0.6


def test_lists_of_the_other_half() -> None:
    """With a splitter of rows: scikit-learn deals rows by their labels otherwise, which cannot be lists."""
    listed = cross_val_predict(Classifier("random", **SMALL), TEXTS, LISTS, cv=KFold(2))
    assert listed.shape == (120,)
    assert {*listed[0]} <= {*NAMES}


def test_a_search_over_keys_of_a_recipe() -> None:
    steps = make_pipeline(FunctionTransformer(lambda texts: [text.upper() for text in texts]), Classifier("random"))
    grid = {"classifier__set": [SMALL["set"]], "classifier__set__train.epochs": [1, 8]}
    found = GridSearchCV(steps, grid, cv=[np.split(np.arange(120), [80])]).fit(TEXTS, SINGLE)
    assert found.best_params_["classifier__set__train.epochs"] == 8
    assert found.best_estimator_[-1].get_params()["set__encoder.dimension"] == 32
    assert found.score(TEXTS, SINGLE) > 0.7


def test_parameters() -> None:
    model = Classifier("astra", set={"train.epochs": 3}, folder="here")
    assert repr(model) == "Classifier(recipe='astra', set={'train.epochs': 3}, folder='here')"
    assert eval(repr(model)).get_params() == clone(model).get_params() == model.get_params()
    assert is_classifier(model)
    model.set_params(**{"set__train.seed": 7, "minutes": 2})
    assert model.get_params()["set"] == {"train.epochs": 3, "train.seed": 7}
    with pytest.raises(InputError, match="unknown parameter 'epochs'; known: recipe, minutes, set"):
        model.set_params(epochs=3)


FAULTS = {
    "a number": ([3], ["a"], r"texts\[0\]: expected a string, got int"),
    "a text": ("a text", ["a"], "texts: expected a list, Series or array of texts, got str"),
    "fewer": (["a", "b"], ["a"], "expected one for each of 2 texts, got 1"),
    "none": (["a", "b"], ["a", None], r"labels\[1\]: expected a label, got None"),
    "nan": (["a", "b"], [1.0, float("nan")], r"labels\[1\]: expected a label, got nan"),
    "counts": (["a", "b"], [[0, 2], [1, 1]], "labels: expected a label for each text, lists of labels"),
    "the same": (["a", "b"], ["x", "x "], "expected classes with different names that are not empty, got 'x', 'x '"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str) -> None:
    texts, labels, expected = FAULTS[name]
    with pytest.raises(InputError, match=expected):
        Classifier("random").fit(texts, labels)


def test_rows_without_labels_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    Classifier("random", **SMALL).fit([*TEXTS[:30], "nothing"], [*LISTS[:30], []])
    assert "Classifier: 1 of 31 texts have no label, and are left out" in capsys.readouterr().err


def test_the_same_texts_many_times_are_few() -> None:
    """None of two texts can be held out."""
    fitted = Classifier("random", **SMALL).fit(TEXTS[:2] * 60, ["one", "two"] * 60)
    assert fitted.predict(TEXTS[:2]).tolist() == ["one", "two"]


def test_it_is_not_fitted_yet() -> None:
    with pytest.raises(NotFittedError, match="call fit first"):
        Classifier().predict(["a text"])


class OfNumbers(Classifier):
    """Reads numbers as scikit-learn's checks give them, by its names: a word for each column and rounded number."""

    def _read(self, numbers: Any, **reset: bool) -> list[str]:
        rows = validate_data(self, numbers, **reset)
        return [" ".join(f"c{n}v{value}" for n, value in enumerate(row)) for row in np.floor(2 * rows).astype(int)]

    def fit(self, X: Any, y: Any) -> "OfNumbers":
        _, checked = validate_data(self, X, y, multi_output=True)
        super().fit(self._read(X), checked)
        return self

    def predict(self, X: Any) -> Any:
        check_is_fitted(self)
        return super().predict(self._read(X, reset=False))

    def predict_proba(self, X: Any) -> Any:
        check_is_fitted(self)
        return super().predict_proba(self._read(X, reset=False))

    def score(self, X: Any, y: Any) -> float:
        return super().score(self._read(X, reset=False), y)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array, tags.input_tags.two_d_array, tags.input_tags.string = False, True, False
        return tags


NAMED = {
    "check_classifiers_regression_target": "any value may be a label, also a fraction",
    "check_supervised_y_2d": "a matrix with one column has one label, on or off, and is no list of classes",
}
WITHOUT_FIT = (
    checks.check_estimator_cloneable,
    checks.check_estimator_tags_renamed,
    checks.check_valid_tag_types,
    checks.check_estimator_repr,
    checks.check_no_attributes_set_in_init,
    checks.check_do_not_raise_errors_in_init_or_set_params,
    checks.check_parameters_default_constructible,
    checks.check_get_params_invariance,
    checks.check_set_params,
    checks.check_estimators_unfitted,
    checks.check_mixin_order,
)


@pytest.mark.parametrize("check", WITHOUT_FIT)
def test_a_check_of_scikit_learn(check: Callable[[str, Any], None]) -> None:
    check("OfNumbers", OfNumbers("random"))


@pytest.mark.slow
def test_every_check_of_scikit_learn() -> None:
    model = OfNumbers("random", set={"train.epochs": 5})
    told = checks.check_estimator(model, expected_failed_checks=NAMED, on_skip=None)
    assert {each["check_name"] for each in told if each["status"] == "xfail"} == {*NAMED}
    assert len(told) > 50
