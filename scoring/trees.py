"""Boosted regression trees for a binary target: fitted with scikit-learn, stored as JSON, evaluated with NumPy alone.

The evaluation is QuickScorer (Lucchese et al., 2015): a bit mask per tree has the leaves that a row may still reach. A
node that sends the row right clears the leaves of its left subtree; the lowest bit that remains is the row's leaf.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np

from schemas.errors import InputError, missing_extra

# Trees, and leaves of each, for few correct labels and for MANY. On Tate's test rows, 200 trees of 31 leaves had 1.8
# nDCG@5 less than SMALL with 400 labels; LARGE had 0.4 more with 8,200. On three sets with 4,400 to 5,200, both are
# equally good.
SMALL, LARGE, MANY = (100, 8), (200, 16), 4_000
MOST_LEAVES = 64  # bits of the widest mask
LEAF = -1
_LARGEST = np.finfo(np.float64).max
_CHUNK = 1024  # rows: the masks of a chunk stay in the processor's cache
_KINDS = {"feature": "i", "threshold": "if", "missing_left": "b", "value": "if", "count": "i"}  # NumPy's kinds in JSON


@dataclass(frozen=True, eq=False)
class Trees:
    """The nodes of all trees, [N] each, in preorder: a node, its left subtree, its right subtree; then the next tree.

    A row goes left at a node if x[feature] <= threshold, or if x[feature] is NaN and `missing_left`. A leaf has feature
    -1 and a `value`. `count`: training rows that reach the node. The log odds are `bias` plus a value of each tree.
    """

    columns: tuple[str, ...]
    feature: np.ndarray
    threshold: np.ndarray
    missing_left: np.ndarray
    value: np.ndarray
    count: np.ndarray
    bias: float

    @classmethod
    def fit(cls, columns: Sequence[str], x: np.ndarray, right: np.ndarray, size: tuple[int, int] = SMALL) -> "Trees":
        """Fit to x float64 [n, C], NaN for a missing value, and bool [n] `right`; `size`: trees, and leaves of each.

        Threads do not change the trees. Raises InputError if all or none are right, or without scikit-learn.
        """
        try:
            from sklearn.ensemble import HistGradientBoostingClassifier
            from threadpoolctl import threadpool_limits
        except ImportError:
            raise missing_extra("boosted trees need scikit-learn", "trainer") from None
        if right.all() or not right.any():
            raise InputError(
                f"{right.sum():,} of {len(right):,} labels are correct, but boosted trees need both correct and "
                "incorrect labels. Name a larger split that the run was not trained on."
            )
        model = HistGradientBoostingClassifier(
            max_iter=size[0],
            learning_rate=0.06,
            max_leaf_nodes=size[1],
            min_samples_leaf=max(5, min(50, len(x) // 200)),
            l2_regularization=10.0,
            max_features=0.4,
            max_bins=255,
            early_stopping=False,
            random_state=0,
        )
        x = np.where(np.isnan(x).all(axis=0), 0.0, finite(x))  # scikit-learn fails for a column without a value
        # Threads would wait for each other at every node, for milliseconds while other processes compute.
        with threadpool_limits(1):
            return cls.from_sklearn(columns, model.fit(x, right))._between(x)

    def _between(self, x: np.ndarray) -> "Trees":
        """Move each threshold halfway to the next value of x [n, C]: no threshold is a value that rounding changes."""
        threshold = self.threshold.copy()
        for feature in range(len(self.columns)):
            values, own = np.unique(x[~np.isnan(x[:, feature]), feature]), self.feature == feature
            above = np.searchsorted(values, threshold[own], side="right")
            low, high = values[np.maximum(above - 1, 0)], values[np.minimum(above, len(values) - 1)]
            middle = low / 2 + high / 2
            inside = (above > 0) & (above < len(values)) & (low <= middle) & (middle < high)
            threshold[own] = np.where(inside, middle, threshold[own])
        return replace(self, threshold=threshold)

    @classmethod
    def from_sklearn(cls, columns: Sequence[str], model: Any) -> "Trees":
        """Take the trees of a fitted HistGradientBoostingClassifier without categorical columns."""
        # scikit-learn has no public access to the nodes: `_predictors` and `_baseline_prediction` are private. Nothing
        # else reads them, and a test compares the log odds with those of `decision_function`.
        ordered = []
        for (predictor,) in model._predictors:
            below = [0]
            while below:
                node = predictor.nodes[below.pop()]
                ordered.append(node)
                if not node["is_leaf"]:
                    below += [node["right"], node["left"]]
        nodes = np.array(ordered)
        is_leaf = nodes["is_leaf"] > 0
        return cls(
            tuple(columns),
            feature=np.where(is_leaf, LEAF, nodes["feature_idx"]),
            threshold=finite(np.where(is_leaf, 0.0, nodes["num_threshold"])),  # infinite if only NaN goes right
            missing_left=nodes["missing_go_to_left"] > 0,
            value=np.where(is_leaf, nodes["value"], 0.0),
            count=nodes["count"].astype(np.int64),
            bias=model._baseline_prediction.item(),
        )

    @cached_property
    def _nodes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each node: its right child, its tree, and the mean value of the leaves below, weighted by their counts.

        Raises ValueError unless the nodes are whole trees, and each count is the sum of the children's counts.
        """
        feature, count, mean = self.feature.tolist(), self.count.tolist(), self.value.tolist()
        right, roots = [0] * len(feature), list[int]()  # roots of the trees that begin after `node`, the first one last
        for node in reversed(range(len(feature))):
            if feature[node] != LEAF:
                if len(roots) < 2:
                    raise ValueError(f"node {node} has no two children")
                first, second = roots.pop(), roots.pop()
                if count[node] != count[first] + count[second]:
                    raise ValueError(f"the count of node {node} is not the sum of its children's counts")
                mean[node] = (count[first] * mean[first] + count[second] * mean[second]) / count[node]
                right[node] = second
            roots.append(node)
        tree = np.cumsum(np.isin(np.arange(len(feature)), roots)) - 1
        return np.array(right), tree, np.array(mean)

    @cached_property
    def leaves(self) -> tuple[np.ndarray, np.ndarray]:
        """The values of all leaves; and the first leaf of each tree, with the number of leaves last."""
        is_leaf = self.feature == LEAF
        return self.value[is_leaf], np.append(0, np.cumsum(np.bincount(self._nodes[1][is_leaf])))

    @cached_property
    def tables(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each column: its thresholds [t], ascending, and masks [t + 2, trees].

        Row i has the masks of a value above i thresholds, the last row the masks of NaN.
        """
        (right, tree, _), first = self._nodes, self.leaves[1]
        most, before = np.diff(first).max(), np.append(0, np.cumsum(self.feature == LEAF))  # leaves before a node
        kind = next(kind for kind in (np.uint16, np.uint32, np.uint64) if most <= np.iinfo(kind).bits)
        tables = []
        for column in range(len(self.columns)):
            nodes = np.flatnonzero(self.feature == column)
            of = tree[nodes]
            begin, end = (np.uint64(1) << (before[at] - first[of]).astype(np.uint64) for at in (nodes, right[nodes]))
            masks = (~(end - begin)).astype(kind)
            thresholds, place = np.unique(self.threshold[nodes], return_inverse=True)
            table = ~np.zeros((len(thresholds) + 2, len(first) - 1), kind)
            np.bitwise_and.at(table, (place + 1, of), masks)
            table = np.bitwise_and.accumulate(table, axis=0)
            table[-1] = table[0]
            to_right = ~self.missing_left[nodes]
            np.bitwise_and.at(table[-1], of[to_right], masks[to_right])
            tables.append((thresholds, table))
        return tables

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the log odds float64 [n] of x [n, C]; a row's result does not depend on the other rows."""
        found = [self._evaluate(finite(x[begin : begin + _CHUNK])) for begin in range(0, len(x), _CHUNK)]
        return np.concatenate([np.zeros(0), *found])

    def _evaluate(self, x: np.ndarray) -> np.ndarray:
        values, first = self.leaves
        found = (
            table.take(thresholds.searchsorted(of_rows) + np.isnan(of_rows), axis=0)  # NaN is above all thresholds
            for of_rows, (thresholds, table) in zip(x.T, self.tables, strict=True)
        )
        masks = reduce(np.bitwise_and, found)
        lowest = np.frexp((masks & -masks).astype(np.float64))[1] - 1  # exact for powers of two
        return values[lowest + first[:-1]].sum(axis=1) + self.bias

    def _descend(self, x: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield the steps of x [n, C] down all trees, level by level: rows, nodes and the nodes' children."""
        x, (right, _, _) = finite(x), self._nodes
        rows, nodes = np.repeat(np.arange(len(x)), len(self._roots)), np.tile(self._roots, len(x))
        while len(nodes):
            inner = self.feature[nodes] != LEAF
            rows, nodes = rows[inner], nodes[inner]
            of_rows = x[rows, self.feature[nodes]]
            to_left = np.where(np.isnan(of_rows), self.missing_left[nodes], of_rows <= self.threshold[nodes])
            children = np.where(to_left, nodes + 1, right[nodes])
            yield rows, nodes, children
            nodes = children

    @property
    def _roots(self) -> np.ndarray:
        return np.flatnonzero(np.diff(self._nodes[1], prepend=-1))

    def walk(self, x: np.ndarray) -> np.ndarray:
        """Return the same as a call, also for trees of more than MOST_LEAVES leaves, but slowly."""
        found = np.full(len(x), self.bias + self.value[self._roots].sum())
        for rows, _, children in self._descend(x):
            np.add.at(found, rows, self.value[children])  # 0 for nodes that are no leaves
        return found

    def contributions(self, x: np.ndarray) -> np.ndarray:
        """Return the terms of the log odds, float64 [n, C + 1], of x [n, C]: one per column, and a constant.

        A split adds the change of the node's mean to the term of its column (Saabas, 2014).
        """
        mean = self._nodes[2]
        terms = np.zeros((len(x), len(self.columns) + 1))
        terms[:, -1] = self.bias + mean[self._roots].sum()
        for rows, nodes, children in self._descend(x):
            np.add.at(terms, (rows, self.feature[nodes]), mean[children] - mean[nodes])
        return terms

    def as_json(self) -> dict[str, Any]:
        """Return an object for `json.dumps`, which `from_json` reads."""
        arrays = {name: getattr(self, name).tolist() for name in _KINDS}
        return {"columns": list(self.columns), **arrays, "bias": self.bias}

    @classmethod
    def from_json(cls, body: Any, most_leaves: int = MOST_LEAVES) -> "Trees":
        """Read what `as_json` returned. Raises ValueError for anything else, and for inconsistent nodes."""
        try:
            arrays = {name: np.array(body[name]) for name in _KINDS}
            columns, bias = tuple(body["columns"]), float(body["bias"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"missing or of another type: {error}") from None
        for name, array in arrays.items():
            if array.dtype.kind not in _KINDS[name] or array.shape != (arrays["value"].size,):
                raise ValueError(f"{name}: not one number per node")
        threshold, value = (arrays.pop(name).astype(np.float64) for name in ("threshold", "value"))
        trees = cls(columns, threshold=threshold, value=value, bias=bias, **arrays)
        if not all(isinstance(column, str) for column in columns) or len(set(columns)) < len(columns):
            raise ValueError("columns: not different names")
        if ((trees.feature < LEAF) | (trees.feature >= len(columns))).any() or (trees.count <= 0).any():
            raise ValueError("a feature is no column, or a count is not positive")
        if not np.isfinite([*threshold, *value, bias]).all():
            raise ValueError("a threshold or a value is not finite")
        if np.diff(trees.leaves[1]).max() > most_leaves:  # `leaves` checks the order of the nodes
            raise ValueError(f"a tree has more than {most_leaves} leaves")
        return trees


def finite(x: np.ndarray) -> np.ndarray:
    """Return x with infinite values replaced by the largest finite ones."""
    return np.clip(x, -_LARGEST, _LARGEST)
