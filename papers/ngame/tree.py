"""NGAME's score fusion (appendix C): a regression tree of depth 7, for `extremis fuse --by papers.ngame.tree:fit`."""

import numpy as np
from sklearn.tree import DecisionTreeRegressor

from schemas import PAD
from scoring.fusion import FusionTree, ShortlistScores
from scoring.trees import Trees

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
    nodes = Trees(
        ("text", "vector", "training points"),
        feature=np.where(leaf, -1, tree.feature).astype(np.int64),
        threshold=np.where(leaf, 0.0, tree.threshold),
        missing_left=np.zeros(len(leaf), bool),
        value=np.where(leaf, tree.value[:, 0, 0], 0.0),
        count=tree.n_node_samples.astype(np.int64),
        bias=0.0,
    )
    return FusionTree(nodes, np.array([float(np.abs(each).max(initial=0.0)) or 1.0 for each in scores]))
