"""Clusters of equal size: their sizes, what they gather, and that nothing but their input decides."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import cluster
from pipelines.cluster import balanced_order


def clusters_of(vectors: np.ndarray, size: int, seed: int = 0) -> np.ndarray:
    """The cluster number of each vector."""
    order, starts = balanced_order(vectors, size, size, seed)
    clusters = np.empty(len(vectors), np.int64)
    clusters[order] = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return clusters


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 30), st.integers(1, 4), st.integers(0, 3))
def test_clusters_are_as_many_as_they_should_be_and_equal_within_one(
    count: int, size: int, dimension: int, seed: int
) -> None:
    # Few values, so that many points are the same.
    vectors = np.random.default_rng(seed).integers(0, 3, (count, dimension)).astype(np.float32)
    clusters = clusters_of(vectors, size, seed)
    sizes = np.bincount(clusters)
    assert len(sizes) == -(-count // size)
    assert sizes.max(initial=0) <= size
    assert not count or sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("size", [16, 50])
def test_groups_that_lie_apart_are_found(size: int) -> None:
    draw = np.random.default_rng(0)
    group = np.repeat(np.arange(8), size)
    centres = 20 * np.linalg.qr(draw.standard_normal((16, 16)))[0][:8]
    vectors = centres[group] + draw.standard_normal((8 * size, 16))
    shuffled = draw.permutation(8 * size)
    clusters = clusters_of(vectors[shuffled], size)
    pure = [len(set(group[shuffled][clusters == number])) == 1 for number in range(8)]
    assert np.mean(pure) >= 0.75


def spread(vectors: np.ndarray, clusters: np.ndarray) -> float:
    """The mean squared distance to the cluster's centre."""
    centres = np.stack([vectors[clusters == number].mean(0) for number in range(clusters.max() + 1)])
    return float(((vectors - centres[clusters]) ** 2).sum(1).mean())


def test_clusters_are_closer_than_random_ones_and_rounds_bring_them_closer(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(1)
    vectors = draw.standard_normal((40, 8))[draw.integers(0, 40, 3000)] + 0.4 * draw.standard_normal((3000, 8))
    vectors = vectors.astype(np.float32)
    clusters = clusters_of(vectors, 25, seed=3)
    assert spread(vectors, clusters) < 0.35 * spread(vectors, draw.permutation(clusters))
    # Neighbours in the tree are near: clusters of twice the size are pairs of them.
    assert spread(vectors, clusters // 2) < 0.5 * spread(vectors, draw.permutation(clusters) // 2)
    monkeypatch.setattr(cluster, "_ROUNDS", 1)
    assert spread(vectors, clusters) < 0.9 * spread(vectors, clusters_of(vectors, 25, seed=3))


def test_the_same_input_gives_the_same_clusters_and_another_seed_others() -> None:
    vectors = np.random.default_rng(2).standard_normal((500, 6)).astype(np.float32)
    first = clusters_of(vectors, 9, seed=1)
    np.testing.assert_array_equal(first, clusters_of(vectors.astype(np.float64), 9, seed=1))
    assert not np.array_equal(first, clusters_of(vectors, 9, seed=2))
