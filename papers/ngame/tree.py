"""NGAME's score fusion (appendix C): a regression tree of depth 7, for `extremis fuse --by papers.ngame.tree:fit`."""

import numpy as np
from sklearn.tree import DecisionTreeRegressor

from schemas import PAD
from scoring.fusion import FusionTree, ShortlistScores

DEPTH = 7


def fit(scored: ShortlistScores, frequency: np.ndarray, relevant: np.ndarray) -> FusionTree:
    """Fit the tree to predict which labels of the shortlists are `relevant` [B, S] bool; `frequency` [B, S].

    Raises ValueError for empty shortlists.
    """
    listed = scored.ids != PAD
    scores = scored.by["text"][listed], scored.by["vector"][listed]
    described = np.stack([*scores, frequency[listed]], axis=-1).astype(np.float32)
    tree = DecisionTreeRegressor(max_depth=DEPTH, random_state=0).fit(described, relevant[listed]).tree_
    leaf = tree.children_left < 0
    return FusionTree(
        feature=np.where(leaf, -1, tree.feature).astype(np.int64),
        threshold=np.where(leaf, 0.0, tree.threshold),
        left=tree.children_left.astype(np.int64),
        right=tree.children_right.astype(np.int64),
        value=tree.value[:, 0, 0].astype(np.float64),
        units=np.array([float(np.abs(each).max(initial=0.0)) or 1.0 for each in scores]),
    )
