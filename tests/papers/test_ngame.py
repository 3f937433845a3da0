"""NGAME's score fusion: fitted against scikit-learn's own tree, and as a file that needs no scikit-learn."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from papers.ngame.tree import DEPTH, fit
from scoring.fusion import FusionTree, ShortlistScores

DRAW = np.random.default_rng(0)
SHAPE = (60, 20)
LABEL_SCORES = DRAW.standard_normal(SHAPE)
SCORES = LABEL_SCORES + DRAW.standard_normal(SHAPE)
FREQUENCY = DRAW.integers(0, 50, SHAPE)
RELEVANT = SCORES + 0.02 * FREQUENCY * (LABEL_SCORES > 0) + 0.3 * DRAW.standard_normal(SHAPE) > 1


def scored(label_scores: np.ndarray, scores: np.ndarray) -> ShortlistScores:
    return ShortlistScores(np.zeros(SHAPE, np.int64), np.ones(SHAPE, bool), {"vector": scores, "text": label_scores})


@pytest.fixture(scope="module")
def fusion() -> FusionTree:
    return fit(scored(LABEL_SCORES, SCORES), FREQUENCY, RELEVANT)


def test_the_arrays_say_what_the_tree_of_scikit_learn_says(fusion: FusionTree) -> None:
    from sklearn.tree import DecisionTreeRegressor

    described = np.stack([LABEL_SCORES, SCORES, FREQUENCY], -1).reshape(-1, 3).astype(np.float32)
    tree = DecisionTreeRegressor(max_depth=DEPTH, random_state=0).fit(described, RELEVANT.reshape(-1))
    others = described + DRAW.standard_normal(described.shape).astype(np.float32)
    for some in (described, others):
        np.testing.assert_array_equal(fusion.predict(*some.T), tree.predict(some))
    assert tree.get_depth() == DEPTH


def test_the_tree_is_added_to_both_scores_and_ranks_better(fusion: FusionTree) -> None:
    fused = fusion.fuse(scored(LABEL_SCORES, SCORES), FREQUENCY)
    total = LABEL_SCORES / np.abs(LABEL_SCORES).max() + SCORES / np.abs(SCORES).max()
    np.testing.assert_allclose(fused, fusion.predict(LABEL_SCORES, SCORES, FREQUENCY) + total)
    larger = fit(scored(5 * LABEL_SCORES, 9 * SCORES), FREQUENCY, RELEVANT)
    np.testing.assert_allclose(larger.fuse(scored(5 * LABEL_SCORES, 9 * SCORES), FREQUENCY), fused)

    def precision(scores: np.ndarray) -> float:
        return float(np.take_along_axis(RELEVANT, np.argsort(-scores, axis=1)[:, :3], 1).mean())

    assert precision(fused) > precision(LABEL_SCORES + SCORES)


def test_a_saved_tree_is_read_without_scikit_learn(fusion: FusionTree, tmp_path: Path) -> None:
    path = tmp_path / "fusion.json"
    path.write_bytes(fusion.to_json())
    np.testing.assert_array_equal(
        FusionTree.parse(path.read_bytes(), str(path)).predict(LABEL_SCORES, SCORES, FREQUENCY),
        fusion.predict(LABEL_SCORES, SCORES, FREQUENCY),
    )
    code = (
        "import sys; from scoring.fusion import FusionTree; import numpy as np\n"
        f"fusion = FusionTree.parse(open({str(path)!r}, 'rb').read(), '')\n"
        "fusion.predict(np.zeros(2), np.ones(2), np.ones(2)); print('sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_single_leaf_is_a_constant_and_padding_is_left_out() -> None:
    ids, ones = np.array([[0, 1, 2], [3, -1, -1]]), np.ones((2, 3))
    scored = ShortlistScores(ids, ids >= 0, {"vector": ones, "text": ones})
    fusion = fit(scored, ones, np.array([[True, False, False], [False, True, True]]))
    np.testing.assert_array_equal(
        fusion.predict(np.zeros((2, 3)), np.zeros((2, 3)), np.zeros(3)), np.full((2, 3), 0.25)
    )
