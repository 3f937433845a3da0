"""The linear ranker: its solver against liblinear, its search against all paths, and the same whatever the threads."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.svm import LinearSVC

from schemas import PAD
from schemas.ragged import Ragged, SparseRows
from trainer.inputs import Inputs
from trainer.linear import tree
from trainer.linear.ranker import LinearRanker, Points, RowFeatures, count_features
from trainer.linear.solver import COST, fit_children
from trainer.rows.threads import set_threads

ROWS, WORDS, LABELS = 300, 60, 40


def draw_points(seed: int, rows: int = ROWS, labels: int = LABELS) -> tuple[Inputs, Ragged]:
    """Draw rows of words, and labels that some of the words stand for."""
    random = np.random.default_rng(seed)
    words = random.integers(0, WORDS, (rows, 8))
    lists = [np.unique([row[0] % labels, row[1] * 7 % labels]) for row in words]
    return Inputs(tokens=Ragged.from_matrix(words)), Ragged.join(
        Ragged(one.astype(np.int64), np.array([0, len(one)])) for one in lists
    )


def dense(x: SparseRows, features: int) -> np.ndarray:
    rows = np.zeros((x.rows, features))
    rows[x.row_of(), x.ids] = x.values
    return rows


def loss(x: np.ndarray, signs: np.ndarray, w: np.ndarray, bias: float) -> float:
    short = np.maximum(0, 1 - signs * (x @ w + bias))
    return float((w @ w + bias * bias) / 2 + COST * (short**2).sum())


def test_weights_are_those_of_liblinear() -> None:
    inputs, labels = draw_points(0)
    words = RowFeatures.of(count_features(inputs, WORDS), WORDS)
    x, features = words(inputs), len(words.seen)
    everything = Ragged(np.arange(ROWS), np.array([0, ROWS]))
    positives = tree._rows_of(labels.values, labels.row_of(), LABELS, ROWS)
    tasks = np.array([[0, 0, LABELS]])
    keys, children, weights, biases = fit_children(x, features, everything, positives, tasks, 0.0)
    w = np.zeros((LABELS, features))
    w[children, keys] = weights
    rows = dense(x, features)
    for label in range(LABELS):
        signs = -np.ones(ROWS)
        signs[positives.values[positives.offsets[label] : positives.offsets[label + 1]]] = 1
        if signs.max() < 0:
            assert biases[label] == -1
            assert not w[label].any()
            continue
        theirs = LinearSVC(C=COST, loss="squared_hinge", dual=True, tol=1e-6, max_iter=20_000).fit(rows, signs)
        best = loss(rows, signs, theirs.coef_[0], float(theirs.intercept_[0]))
        assert best * 0.9999 <= loss(rows, signs, w[label], float(biases[label])) <= best * 1.02


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), leaf=st.sampled_from([3, 11, 100]))
def test_a_wide_beam_ranks_as_all_paths_do(seed: int, leaf: int) -> None:
    inputs, labels = draw_points(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "LEAF", leaf)
        patch.setattr(tree, "BRANCH", 2)
        patch.setattr(tree, "BEAM", LABELS)
        ranker = LinearRanker.fit(Points(count_features(inputs, WORDS), labels), LABELS, WORDS)
        scores, ids = ranker.rank(inputs, LABELS + 5)
    x = dense(ranker.words(inputs), len(ranker.words.seen))
    paths = np.ones((ROWS, 1))
    for level in ranker.tree.levels:
        w = np.zeros((len(level.biases), len(ranker.words.seen)))
        key = np.repeat(level.keys, np.diff(level.starts))
        w[level.children, key % len(ranker.words.seen)] = level.weights
        own = np.exp(-(np.maximum(0, 1 - (x @ w.T + level.biases)) ** 3))
        paths = np.repeat(paths, np.diff(level.first), axis=1) * own
    assert (ids[:, LABELS:] == PAD).all()
    assert (np.sort(ids[:, :LABELS]) == np.arange(LABELS)).all()
    expected = np.take_along_axis(paths, np.argsort(ranker.tree.order)[ids[:, :LABELS]], 1)
    assert np.allclose(scores[:, :LABELS], expected, atol=1e-5)
    assert (np.diff(scores) <= 0).all()


def test_threads_do_not_show() -> None:
    inputs, labels = draw_points(3)
    rankings = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            set_threads(threads)
            rankings.append(
                LinearRanker.fit(Points(count_features(inputs, WORDS), labels), LABELS, WORDS).rank(inputs, 5)
            )
    finally:
        set_threads(before)
    assert all(np.array_equal(one, other) for one, other in zip(*rankings, strict=True))


@given(count=st.integers(1, 200), depth=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_clusters_are_balanced(count: int, depth: int) -> None:
    ids = np.arange(count, dtype=np.int32) % 9
    points = SparseRows(ids, np.ones(count, np.float32), np.arange(count + 1))
    order, bounds = tree._cluster(points, 9, depth)
    assert np.array_equal(np.sort(order), np.arange(count))
    assert len(bounds) == 2**depth + 1
    assert np.ptp(np.diff(bounds)) <= 1


def test_words_of_no_training_row_are_left_out() -> None:
    words = RowFeatures.of(count_features(Inputs(tokens=Ragged.from_matrix(np.array([[1, 2], [1, 3]]))), 10), 10)
    x = words(Inputs(tokens=Ragged.from_matrix(np.array([[1, 9], [8, 9], [PAD, PAD]]))))
    assert list(np.diff(x.offsets)) == [1, 0, 0]
    assert x.values[0] == pytest.approx(1)


def test_features_of_the_data_are_taken_as_they_are() -> None:
    rows = SparseRows(np.array([4, 7, 7], np.int32), np.array([3, 4, 2], np.float32), np.array([0, 2, 3]))
    x = RowFeatures.of(rows, 0)(Inputs(features=rows))
    assert np.allclose(dense(x, 2), [[0.6, 0.8], [0, 1]])
