"""Score fusion: both scores plus a regression tree's value for both scores and the label's frequency (NGAME, C).

The paper's scores are cosines, comparable with the tree's values in [0, 1]. Here, scores can have any scale, and are
divided by the largest score in the data that the tree was fitted to. scikit-learn fits the tree. A JSON file contains
the tree as plain arrays, so reading the tree needs neither scikit-learn nor pickle.
"""

import json
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from schemas.errors import MissingExtra, TableError

DEPTH = 7
FORMAT = 2
_LEAF = -1
_INTEGERS = ("feature", "left", "right")  # the other arrays are float64


class ShortlistScores(NamedTuple):
    """Scores of S labels per query: `ids` [B, S] int64, padded with -1; the other fields [B, S], 0 if missing."""

    ids: np.ndarray
    scores: np.ndarray
    texts: np.ndarray
    votes: np.ndarray
    linear: np.ndarray


@dataclass(frozen=True, eq=False)
class FusionTree:
    """T(d) for d = (E(z).x, w.x, f): node i goes `left` [n] if d[feature] <= threshold, else `right`; 0 is the root.

    A leaf has feature -1 and `value` [n]. Descriptors are float32, as in scikit-learn's comparisons. `units` [2]:
    divisors of both scores, applied before the scores are added to T(d).
    """

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray
    units: np.ndarray
    reads_texts = True

    @classmethod
    def fit(
        cls,
        label_scores: np.ndarray,
        scores: np.ndarray,
        frequency: np.ndarray,
        relevant: np.ndarray,
        depth: int = DEPTH,
    ) -> "FusionTree":
        """Fit the tree to predict `relevant` [n] bool for the pairs of a validation shortlist.

        `label_scores` [n]: E(z).x of each pair (query, label); `scores` [n]: w.x; `frequency` [n]: training points of
        the label. Raises InputError if scikit-learn is not installed, ValueError for no pairs.
        """
        try:
            from sklearn.tree import DecisionTreeRegressor
        except ImportError:
            raise MissingExtra("score fusion by a tree needs scikit-learn", "fusion") from None

        described = _describe(label_scores, scores, frequency).reshape(-1, 3)
        tree = DecisionTreeRegressor(max_depth=depth, random_state=0).fit(described, relevant.reshape(-1)).tree_
        leaf = tree.children_left < 0
        return cls(
            feature=np.where(leaf, _LEAF, tree.feature).astype(np.int64),
            threshold=np.where(leaf, 0.0, tree.threshold),
            left=tree.children_left.astype(np.int64),
            right=tree.children_right.astype(np.int64),
            value=tree.value[:, 0, 0].astype(np.float64),
            units=np.array([_largest(label_scores), _largest(scores)]),
        )

    def predict(self, label_scores: np.ndarray, scores: np.ndarray, frequency: np.ndarray) -> np.ndarray:
        """Return T(d) as float64 of the arrays' common shape; all pairs descend the tree together, level by level."""
        described = _describe(label_scores, scores, frequency)
        flat = described.reshape(-1, 3)
        node = np.zeros(len(flat), np.int64)
        going = np.flatnonzero(self.feature[node] != _LEAF)
        while len(going):
            inner = node[going]
            goes_left = flat[going, self.feature[inner]] <= self.threshold[inner]
            node[going] = np.where(goes_left, self.left[inner], self.right[inner])
            going = going[self.feature[node[going]] != _LEAF]
        return self.value[node].reshape(described.shape[:-1])

    def fuse(self, scored: ShortlistScores, frequency: np.ndarray) -> np.ndarray:
        """Return T(d) + E(z).x + w.x, with scores divided by `units`, [B, S], for labels with `frequency` [B, S]."""
        return sum(self.parts(scored, frequency).values(), np.float64(0))

    def parts(self, scored: ShortlistScores, frequency: np.ndarray) -> dict[str, np.ndarray]:
        """Return the terms of the fused scores, [B, S] each."""
        text, vector = scored.texts / self.units[0], scored.scores / self.units[1]
        return {"text": text, "vector": vector, "tree": self.predict(scored.texts, scored.scores, frequency)}

    def to_json(self) -> bytes:
        """Return the tree as JSON."""
        return json.dumps({"format": FORMAT, **{name: array.tolist() for name, array in vars(self).items()}}).encode()

    @classmethod
    def parse(cls, data: bytes, place: str) -> "FusionTree":
        """Parse the tree from the content of a file at `place`. Raises TableError for an invalid file."""
        try:
            body = json.loads(data)
            kinds = {field.name: np.int64 if field.name in _INTEGERS else np.float64 for field in fields(cls)}
            tree = cls(**{name: np.array(body[name], kind) for name, kind in kinds.items()})
            if body["format"] != FORMAT:
                raise ValueError(f"format {body['format']}, expected {FORMAT}")
            if not tree._is_whole():
                raise ValueError("the nodes are inconsistent")
        except (ValueError, KeyError, TypeError) as error:
            raise TableError(f"{place}: not a fusion tree: {error}. Fit the fusion again.") from None
        return tree

    def _is_whole(self) -> bool:
        """Return whether every node is complete and comes before its children, so that every path ends."""
        nodes, inner = len(self.feature), np.flatnonzero(self.feature != _LEAF)
        equal = all(array.shape == (nodes,) for name, array in vars(self).items() if name != "units")
        if not (equal and nodes and self.units.shape == (2,) and (self.units > 0).all()):
            return False
        children = np.stack([self.left[inner], self.right[inner]])
        named = (self.feature >= _LEAF) & (self.feature < 3)
        return bool(named.all() and ((children > inner) & (children < nodes)).all())


def _describe(label_scores: np.ndarray, scores: np.ndarray, frequency: np.ndarray) -> np.ndarray:
    """Return the descriptors d, float32 [..., 3]."""
    return np.stack(np.broadcast_arrays(label_scores, scores, frequency), axis=-1).astype(np.float32)


def _largest(scores: np.ndarray) -> float:
    return float(np.abs(scores).max(initial=0.0)) or 1.0
