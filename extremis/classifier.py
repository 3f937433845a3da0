"""`Classifier`: shard, run and export behind scikit-learn's interface, without an import of scikit-learn."""

import inspect
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from extremis import training, using
from extremis.console import say
from schemas.errors import InputError
from schemas.table import Table
from scoring.containers import items_of, require_texts
from scoring.export_versions import KIND

if TYPE_CHECKING:
    from scoring.options import Source
    from scoring.predict import Model

_DENSE, _BEST = 1000, 100  # labels up to which all have a probability, and labels of a text that have one of more
_FEW = 100  # different texts from which some are held out to learn probabilities from; of fewer, a tenth may be none
_GIVEN = 0.5  # probability from which on a label is given
_LEAST = 1e-6  # least probability, and least doubt, so that the logarithm of either is a number


@dataclass(frozen=True)
class _Labels:
    """The labels of N texts: their `places` among `classes` [L], and the `form` in which they were given."""

    form: str  # "single", "lists", "dense" or "sparse"
    classes: np.ndarray
    places: Sequence[Sequence[int]]

    @classmethod
    def of(cls, labels: Any) -> "_Labels":
        """Read a label for each text, lists of labels, or an indicator matrix [N, L]. Raises InputError."""
        listed = items_of(labels)
        if listed is not None and not any(np.ndim(row) or isinstance(row, set | frozenset) for row in listed):
            for number, label in enumerate(listed):
                if label is None or label != label:
                    raise InputError(f"labels[{number}]: expected a label, got {label}. Leave this row out.")
            classes, places = np.unique(np.array(listed), return_inverse=True)
            return cls("single", classes, places[:, None].tolist())
        if listed is not None and all(isinstance(label, str) for row in listed for label in row):
            names = sorted({label for row in listed for label in row})
            place_of = {name: place for place, name in enumerate(names)}
            return cls("lists", np.array(names), [sorted({place_of[label] for label in row}) for row in listed])
        form, matrix = ("sparse", labels.tocsr()) if hasattr(labels, "tocsr") else ("dense", np.array(labels))
        if matrix.ndim != 2 or not np.isin(matrix.data if form == "sparse" else matrix, (0, 1)).all():
            expected = "a label for each text, lists of labels (strings), or an indicator matrix [N, L] of 0 and 1"
            raise InputError(parameter="labels", got=type(labels).__name__, expected=expected)
        classes = np.array([*getattr(labels, "columns", range(matrix.shape[1]))])
        return cls(form, classes, [matrix[[row]].nonzero()[1].tolist() for row in range(matrix.shape[0])])

    @property
    def keys(self) -> list[str]:
        """Keys of the classes in DATA."""
        return [str(name).strip() for name in self.classes.tolist()]

    def like(self, places: Sequence[Sequence[int]]) -> Any:
        """Return other `places` in the form of these labels: an array of labels or of lists, or a matrix."""
        if self.form == "single":
            return self.classes[[first for first, *_ in places]]
        if self.form == "lists":
            lists = np.empty(len(places), object)
            lists[:] = [self.classes[row].tolist() for row in places]
            return lists
        rows, columns = np.repeat(np.arange(len(places)), [*map(len, places)]), np.concatenate([[], *places])
        return _matrix(self.form, np.ones(len(rows), np.int64), rows, columns.astype(int), len(places), self.classes)


def _matrix(form: str, values: Any, rows: np.ndarray, columns: np.ndarray, count: int, classes: np.ndarray) -> Any:
    """Return `values` [n] at `rows` [n] and `columns` [n] as a matrix [count, L], of SciPy if `form` is sparse."""
    if form == "sparse":
        from scipy.sparse import csr_matrix

        return csr_matrix((values, (rows, columns)), (count, len(classes)))
    matrix = np.zeros((count, len(classes)), values.dtype)
    matrix[rows, columns] = values
    return matrix


class Classifier:
    """A classifier of texts for scikit-learn: `fit`, `predict`, `predict_proba`, `score`, `classes_`.

    `recipe`, `minutes`, `set`: as of `extremis.run`; a search over a recipe's keys names them set__KEY. `decision`: as
    of `Model.predict`. Default: all labels with a probability of at least 0.5; but always the best one alone if `fit`
    got a label for each text. `folder`: where each `fit` keeps its export; None: a temporary folder that lives as long
    as the object. `verbose`: show progress.

    A pickle holds the path of the export, which is opened and checked again with it.
    """

    def __init__(
        self,
        recipe: str | PathLike[str] = "auto",
        minutes: float | None = None,
        *,
        set: Mapping[str, object] | None = None,
        decision: "Source" = None,
        folder: str | PathLike[str] | None = None,
        verbose: bool = False,
    ) -> None:
        self.recipe, self.minutes, self.set, self.decision = recipe, minutes, set, decision
        self.folder, self.verbose = folder, verbose

    def __repr__(self) -> str:
        stated = inspect.signature(type(self)).parameters
        changed = [(name, each) for name, each in self.get_params(False).items() if each != stated[name].default]
        return f"Classifier({', '.join(f'{name}={each!r}' for name, each in changed)})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if name not in ("model_", "_places", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if "export_" in state:
            self._open()

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(multi_label=True),
            non_deterministic=True,
            input_tags=InputTags(one_d_array=True, two_d_array=False, string=True),
        )

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters; if `deep`, also the stated keys of the recipe, as set__KEY."""
        own = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        keys = self.set if deep and isinstance(self.set, Mapping) else {}
        return own | {f"set__{key}": value for key, value in keys.items()}

    def set_params(self, **parameters: Any) -> "Classifier":
        """Change parameters; set__KEY changes a key of the recipe. Raises InputError for an unknown parameter."""
        known = self.get_params(False)
        for name, value in parameters.items():
            own, _, key = name.partition("__")
            if own not in known or (key and own != "set"):
                raise InputError(f"Classifier: unknown parameter {name!r}; known: {', '.join(known)}, set__KEY.")
            setattr(self, own, {**(self.set or {}), key: value} if key else value)
        return self

    def fit(self, texts: Any, labels: Any) -> "Classifier":
        """Train on N texts and their labels: a label for each, lists of labels, or an indicator matrix [N, L].

        Texts without labels are left out, and counted in a message. Raises InputError, StorageError.
        """
        from extremis.auto import holdout_share

        listed, given = items_of(texts), _Labels.of(labels)
        if listed is None or not isinstance(self.set, Mapping | None):
            name, got = ("texts", texts) if listed is None else ("set", self.set)
            expected = {"texts": "a list, Series or array of texts", "set": "a mapping of a recipe's keys to values"}
            raise InputError(parameter=name, got=type(got).__name__, expected=expected[name])
        require_texts(listed, "texts")
        keys, rows = given.keys, given.places
        if len(listed) != len(rows):
            raise InputError(f"labels: expected one for each of {len(listed):,} texts, got {len(rows):,}.")
        if not all(keys) or len({*keys}) < len(keys):
            got = ", ".join(map(repr, given.classes.tolist()))[:80]
            raise InputError(parameter="labels", got=got, expected="classes with different names that are not empty")
        pairs = [(text, [keys[place] for place in row]) for text, row in zip(listed, rows, strict=True) if row]
        if len(pairs) < len(listed):
            say(f"Classifier: {len(listed) - len(pairs):,} of {len(listed):,} texts have no label, and are left out")
        changes = dict(self.set or {})
        points = len({text for text, _ in pairs})  # rows with the same text become one
        if self.recipe != "auto" and points >= _FEW:  # auto holds rows out itself
            changes = {"data.holdout": holdout_share(points), **changes}
        if self.folder is None:
            self._kept = tempfile.TemporaryDirectory(prefix="classifier-")
            place = self._kept.name
        else:
            os.makedirs(self.folder, exist_ok=True)
            place = tempfile.mkdtemp(prefix="fit-", dir=self.folder)
        with tempfile.TemporaryDirectory(prefix="classifier-") as scratch:
            data, run, out = os.path.join(scratch, "data"), os.path.join(scratch, "run"), os.path.join(place, "export")
            training.shard(pairs, data, progress=self.verbose)
            training.run(self.recipe, data, run, minutes=self.minutes, set=changes, progress=self.verbose)
            exported = using.export(data, run, out, progress=self.verbose)
        self._given, self._digest = _Labels(given.form, given.classes, []), exported.digest
        self.classes_, self.export_ = given.classes, exported.out
        self._open()
        return self

    def _open(self) -> None:
        """Open what `fit` exported. Raises TableError if it is gone, InputError if another export is in its place."""
        if Table.open(self.export_, KIND).digest != self._digest:
            raise InputError(f"{self.export_}: another export than the one of this classifier. Call fit again.")
        self.model_: Model = using.load(self.export_)
        place_of = {key: place for place, key in enumerate(self._given.keys)}
        self._places = np.array([*(place_of[key] for key in self.model_.labels.keys), -1])  # of labels, and of padding

    def predict(self, texts: Any) -> Any:
        """Return labels of N texts as `fit` got them: an array [N] of labels or of lists, or a matrix [N, L]."""
        places = self._predict(texts)  # raises an error before anything is read of an object without `fit`
        return self._given.like(places)

    def predict_proba(self, texts: Any) -> Any:
        """Return probabilities float64 [N, L]; of more than 1,000 labels a sparse matrix with the best 100 of a text.

        They are sigmoids of scores if there were too few texts to learn probabilities from. If `fit` got a label for
        each text, those of a text add up to 1.
        """
        places, found = self._rank(texts)
        rows, ranks = np.nonzero(places >= 0)
        form = "dense" if len(self.classes_) <= _DENSE else "sparse"
        return _matrix(form, found[rows, ranks], rows, places[rows, ranks], len(places), self.classes_)

    def score(self, texts: Any, labels: Any) -> float:
        """Return the micro F1 of `predict`; where each text has one label, this is the accuracy."""
        right, predicted = _Labels.of(labels), self._predict(texts)
        names, own_names = right.keys, self._given.keys
        pairs = [
            ({names[p] for p in row}, {own_names[p] for p in own})
            for row, own in zip(right.places, predicted, strict=True)
        ]
        return 2 * sum(len(a & b) for a, b in pairs) / max(1, sum(len(a) + len(b) for a, b in pairs))

    def _rank(self, texts: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return places of the best labels in `classes_`, best first, -1 as padding, and probabilities, [N, K] each."""
        self._require_fit()
        ids, found = self.model_.rank(texts, _BEST if len(self.classes_) > _DENSE else len(self.classes_))
        found = np.where(ids < 0, 0, found.astype(np.float64).clip(_LEAST, 1 - _LEAST))
        if self._given.form == "single":
            found[:, 0] *= 1 + 1e-9  # a curve has flat parts, but the best label by score is the one of `predict`
            found /= found.sum(1, keepdims=True)
        return self._places[ids], found

    def _predict(self, texts: Any) -> list[list[int]]:
        """Return the places of each text's labels in `classes_`."""
        self._require_fit()
        is_single = self._given.form == "single"
        if self.decision is None and not is_single:
            places, found = self._rank(texts)
            return [row[is_given].tolist() for row, is_given in zip(places, found >= _GIVEN, strict=True)]
        number, ids_of = 1 if is_single else None, self.model_.labels.ids
        predictions = self.model_.predict(texts, self.decision, max_labels=number, at_least=number)
        return [self._places[ids_of([label.key for label in each.labels])].tolist() for each in predictions]

    def _require_fit(self) -> None:
        if "model_" not in vars(self):
            try:
                from sklearn.exceptions import NotFittedError as error
            except ImportError:
                error = InputError
            raise error("Classifier: call fit first.")
