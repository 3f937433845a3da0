"""The linear ranker: its loss against an optimizer's over all rows, its ranking against a product, and its file."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from scipy.optimize import minimize

from schemas import PAD, storage
from schemas.errors import TableError
from schemas.manifest import Manifest, publish, write_file
from schemas.ragged import Ragged, SparseRows, offsets_of
from schemas.table import Table
from scoring import compiled, linear, row_kernels, solver, words
from scoring.linear import FILE, LinearRanker
from scoring.scan import largest
from scoring.solver import COST, best_labels
from scoring.words import Points, RowFeatures, count_features
from tests.builders import build_data
from trainer.inputs import Inputs
from trainer.methods.sections import Data
from trainer.threads import set_threads

ROWS, WORDS, LABELS = 300, 60, 40


def draw_points(seed: int) -> tuple[Inputs, Ragged]:
    """Draw rows of words, and labels that some of the words stand for."""
    random = np.random.default_rng(seed)
    rows = random.integers(0, WORDS, (ROWS, 8))
    lists = [np.unique([row[0] % LABELS, row[1] * 7 % LABELS]) for row in rows]
    return Inputs(tokens=Ragged.from_matrix(rows)), Ragged.join(
        Ragged(one.astype(np.int64), np.array([0, len(one)])) for one in lists
    )


def fit(inputs: Inputs, labels: Ragged) -> LinearRanker:
    return LinearRanker.fit(Points(count_features(inputs, WORDS), labels), LABELS, WORDS)


def dense(x: SparseRows, features: int) -> np.ndarray:
    rows = np.zeros((x.rows, features))
    np.add.at(rows, (x.row_of(), x.ids), x.values)
    return rows


def test_weights_are_those_of_the_loss_over_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_SMALLEST", 0.0)
    inputs, labels = draw_points(0)
    fitted = fit(inputs, labels)
    x = dense(fitted.words(inputs), len(fitted.words.seen))
    weights = dense(fitted.weights, LABELS).T
    right = labels.contains(np.tile(np.arange(LABELS), (ROWS, 1)))
    for label in range(LABELS):
        signs = np.where(right[:, label], 1, -1)

        def loss(w: np.ndarray, signs: np.ndarray = signs) -> tuple[float, np.ndarray]:
            short = np.maximum(0, 1 - signs * (x @ w - 1))
            return w @ w / 2 + COST * (short**2).sum(), w - 2 * COST * (short * signs) @ x

        if not right[:, label].any():
            assert not weights[label].any()
            continue
        best = minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").fun
        assert best * 0.9999 <= loss(weights[label])[0] <= best * 1.02


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), k=st.sampled_from([1, 7, LABELS + 5]))
def test_the_best_labels_are_those_of_the_product(seed: int, k: int) -> None:
    inputs, labels = draw_points(seed)
    fitted = fit(inputs, labels)
    scores, ids = fitted.rank(inputs, k)
    product = dense(fitted.words(inputs), len(fitted.words.seen)) @ dense(fitted.weights, LABELS)
    expected = -np.sort(-np.maximum(product, 0), axis=1)[:, :k]
    found = ids != PAD
    assert np.allclose(
        np.where(found, np.take_along_axis(product, np.maximum(ids, 0), 1), 0)[:, : len(expected[0])],
        expected,
        atol=1e-5,
    )
    assert np.array_equal(found[:, : len(expected[0])], expected > 0)
    assert (np.diff(scores) <= 0).all()
    assert ((scores > 0) == found).all()
    votes = fitted.votes(inputs, k)
    assert votes.rows == ROWS
    assert np.array_equal(np.sort(ids[found]), np.sort(votes.ids))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_the_kth_largest_value_is_that_of_the_sorted_ones(values: list[int]) -> None:
    found = [largest.py_func(np.array(values), k) for k in range(1, len(values) + 1)]
    assert found == sorted(values, reverse=True)


def test_threads_do_not_show() -> None:
    inputs, labels = draw_points(3)
    rankings = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            set_threads(threads)
            rankings.append(fit(inputs, labels).rank(inputs, 5))
    finally:
        set_threads(before)
    assert all(np.array_equal(one, other) for one, other in zip(*rankings, strict=True))


def test_words_of_no_training_row_are_left_out() -> None:
    features = RowFeatures.of(count_features(Inputs(tokens=Ragged.from_matrix(np.array([[1, 2], [1, 3]]))), 10), 10)
    x = features(Inputs(tokens=Ragged.from_matrix(np.array([[1, 9], [8, 9], [PAD, PAD]]))))
    assert list(np.diff(x.offsets)) == [1, 0, 0]
    assert x.values[0] == pytest.approx(1)


def test_features_of_the_data_are_taken_as_they_are() -> None:
    rows = SparseRows(np.array([4, 7, 7], np.int32), np.array([3, 4, 2], np.float32), np.array([0, 2, 3]))
    x = RowFeatures.of(rows, 0)(Inputs(features=rows))
    assert np.allclose(dense(x, 2), [[0.6, 0.8], [0, 1]])


def test_what_words_add_makes_the_score() -> None:
    inputs, labels = draw_points(2)
    fitted = fit(inputs, labels)
    assert inputs.tokens is not None
    for row in range(20):
        tokens = inputs.tokens.slice(row, row + 1)
        (scores,), (ids,) = fitted.rank(Inputs(tokens), 3)
        for score, label in zip(scores[ids != PAD], ids[ids != PAD], strict=True):
            added = [weight for _, weight in fitted.explain(Inputs(tokens), int(label))]
            assert sum(added) == pytest.approx(score, abs=1e-4)
            assert added == sorted(added, reverse=True)


def test_it_comes_back_from_its_file_and_another_is_refused(tmp_path: Path) -> None:
    inputs, labels = draw_points(1)
    fitted, url = fit(inputs, labels), str(tmp_path)
    table = Table(url, publish(url, Manifest(kind="fusion", shards=(fitted.write(url),))))
    read = LinearRanker.read(table)
    assert read is not None
    assert all(
        np.array_equal(one, other) for one, other in zip(read.rank(inputs, 5), fitted.rank(inputs, 5), strict=True)
    )
    arrays = load((tmp_path / FILE).read_bytes())
    for name, changed in (("offsets", arrays["offsets"][:-1]), ("of_labels", arrays["of_labels"] + LABELS)):
        damaged = write_file(url, FILE, save({**arrays, name: changed}))
        with pytest.raises(TableError, match="not a linear ranker"):
            LinearRanker.read(Table(url, publish(url, Manifest(kind="fusion", shards=(damaged,)))))
    storage.write_bytes(f"{url}/{FILE}", b"other")
    with pytest.raises(TableError, match="damaged"):
        LinearRanker.read(table)


def test_it_takes_the_first_rows_that_its_bytes_hold(tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data"), rows={"train": 60, "val": 4, "test": 4})
    whole = LinearRanker.of(data.layout, Data(), ["input_ids"])
    assert whole is not None
    assert LinearRanker.of(data.layout, Data(), ["input_ids"], 0) is None
    part = LinearRanker.of(data.layout, Data(), ["input_ids"], 1 << 13)
    assert part is not None
    assert len(part.words.seen) < len(whole.words.seen)


def test_it_takes_no_more_rows_than_its_seconds_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = build_data(str(tmp_path / "data"), rows={"train": 60, "val": 4, "test": 4}, labels=80)
    whole, timed = (LinearRanker.of(data.layout, Data(), ["input_ids"], seconds=each) for each in (math.inf, 600.0))
    assert whole is not None
    assert timed is not None
    assert np.array_equal(whole.weights.values, timed.weights.values)
    assert LinearRanker.of(data.layout, Data(), ["input_ids"], seconds=0.0) is None
    clock = iter([0.0, 100.0, 0.0, 1.0])  # all rows are too many, half of them are not
    monkeypatch.setattr(solver.time, "perf_counter", lambda: next(clock))
    half = LinearRanker.of(data.layout, Data(), ["input_ids"], seconds=600.0)
    assert half is not None
    assert 0 < len(half.words.seen) < len(whole.words.seen)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_features_may_be_zero_or_negative(seed: int) -> None:
    """A row whose sum is 0, or is 0 again, is met once."""
    random = np.random.default_rng(seed)
    ids = np.sort(random.permuted(np.tile(np.arange(12, dtype=np.int32), (ROWS, 1)), axis=1)[:, :6], axis=1)
    values = random.choice(np.array([-1, 0, 0, 1], np.float32), ids.shape)
    rows = SparseRows(ids.ravel(), values.ravel(), np.arange(ROWS + 1) * 6)
    labels = Ragged.from_matrix(random.integers(0, LABELS, (ROWS, 1)))
    fitted = LinearRanker.fit(Points(rows, labels), LABELS, 0)
    scores, ids = fitted.rank(Inputs(features=rows), 5)
    assert np.isfinite(fitted.weights.values).all()
    assert np.array_equal(scores > 0, ids != PAD)


@pytest.mark.parametrize("k", [1, 3, LABELS])
def test_few_rows_are_ranked_without_numba_as_many_are(k: int) -> None:
    inputs, labels = draw_points(4)
    fitted = fit(inputs, labels)
    x = fitted.words(inputs)
    scores, ids = best_labels(x, fitted.weights, LABELS, k)
    few, of_few = words._best_labels(x, fitted.weights, LABELS, k)
    np.testing.assert_array_equal(few, scores)
    np.testing.assert_array_equal(of_few, ids)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 12), st.booleans())
def test_sums_of_one_row_have_the_bits_of_numpy(seed: int, k: int, is_positive: bool) -> None:
    """Also if the lists of common features are only looked up for the best."""
    draw = np.random.default_rng(seed)
    lists, size = 12, int(draw.integers(1, 600))
    shares = draw.choice([0.01, 0.1, 0.9], lists)
    ids = [np.flatnonzero(draw.random(size) < share) for share in shares]
    weights = (
        draw.random(sum(map(len, ids))).astype(np.float32) ** 4 if is_positive else draw.normal(size=sum(map(len, ids)))
    )
    found = SparseRows(
        np.concatenate(ids).astype(np.int32),
        weights.astype(np.float32).round(2),
        offsets_of(np.array([*map(len, ids)])),
    )
    features = np.flatnonzero(draw.random(lists) < 0.6)
    values = (draw.random(len(features)) * (1 - shares[features])).astype(np.float32)
    row = SparseRows(features, values, np.array([0, len(features)]))
    bounds = np.array([each.max(initial=0) for each in np.split(found.values, found.offsets[1:-1])], np.float32)
    sums = row_kernels.sum_lists(features, values, *found, size, k, bounds if is_positive else bounds[:0])
    best, scores = compiled.best(k, *sums)
    for one, other in zip((scores, best), words._best_labels(row, found, size, k), strict=True):
        np.testing.assert_array_equal(one, other[0][: len(one)])
        assert (other[0][len(one) :] <= 0).all()
