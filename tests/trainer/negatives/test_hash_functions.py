"""Collisions of SimHash and DWTA against their laws, counted over independent draws of the functions.

A table is one trial with success probability p^K, exactly so where tables are independent; a seed is one trial of
1 - (1 - p^K)^L. Counts are held against the binomial law two-sided at 1e-4 a comparison, with fixed seeds.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import binomtest

from trainer.negatives.lsh import HashFunctions

RARE = 1e-4


def pair_at(angle: float, dimension: int, seed: int) -> np.ndarray:
    """Two unit vectors at `angle`, [2, D]."""
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((dimension, 2)))[0].T
    return np.stack([basis[0], np.cos(angle) * basis[0] + np.sin(angle) * basis[1]]).astype(np.float32)


def wta_collision(pair: np.ndarray, width: int) -> float:
    """By enumeration of all bins that hold a coordinate which is not zero in both: one winner takes both."""
    winners = []
    for coordinates in itertools.combinations(range(pair.shape[1]), width):
        bins = np.where(pair[:, coordinates] == 0, -np.inf, pair[:, coordinates])
        if np.isfinite(bins).any(1).all():
            winners.append(bins[0].argmax() == bins[1].argmax())
    return float(np.mean(winners))


def close(hits: int, trials: int, expected: float) -> bool:
    return bool(binomtest(hits, trials, expected).pvalue > RARE)


@pytest.mark.parametrize("angle", [0.2, 0.9, 1.6, 2.5])
def test_a_code_of_simhash_collides_as_its_angle_says(angle: float) -> None:
    pair = pair_at(angle, 24, seed=1)
    codes = HashFunctions("simhash", 24, bits=3, tables=20_000, seed=5).codes(pair)
    assert close(int((codes[0] == codes[1]).sum()), 20_000, (1 - angle / np.pi) ** 3)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("noise", [0.3, 1.5])
def test_a_code_of_dwta_collides_as_its_rank_similarity_says(width: int, noise: float) -> None:
    draw = np.random.default_rng(2)
    pair = draw.standard_normal((1, 12)) + noise * draw.standard_normal((2, 12))
    p = wta_collision(pair, width)
    # Tables of one draw share permutations, so that only one of each draw is counted.
    codes = np.stack([HashFunctions("dwta", 12, 2, 1, seed, width).codes(pair)[:, 0] for seed in range(4000)])
    assert close(int((codes[:, 0] == codes[:, 1]).sum()), 4000, p**2)


@pytest.mark.parametrize(("family", "dimension"), [("simhash", 32), ("dwta", 64)])
@pytest.mark.parametrize("noise", [0.2, 0.6, 1.2])
def test_any_of_the_tables_collides_as_the_paper_says(family: str, dimension: int, noise: float) -> None:
    bits, tables, seeds = 6, 30, 1500
    draw = np.random.default_rng(3)
    pair = (draw.standard_normal((1, dimension)) + noise * draw.standard_normal((2, dimension))).astype(np.float32)
    if family == "simhash":
        cosine = pair[0] @ pair[1] / np.prod(np.linalg.norm(pair, axis=1))
        p = 1 - np.arccos(cosine) / np.pi
    else:
        p = wta_collision(pair, 2)
    met = [
        (c[0] == c[1]).any()
        for c in (HashFunctions(family, dimension, bits, tables, s).codes(pair) for s in range(seeds))
    ]
    assert close(int(np.sum(met)), seeds, 1 - (1 - p**bits) ** tables)


def test_bins_of_zeros_borrow_and_collide_as_the_others_do() -> None:
    """Equation 4: for one support, DWTA collides as WTA does over the bins that are not empty, however sparse."""
    draw = np.random.default_rng(4)
    pair = np.zeros((2, 60), np.float32)
    support = draw.choice(60, 8, replace=False)
    pair[:, support] = draw.standard_normal(8) + 0.7 * draw.standard_normal((2, 8))
    p = wta_collision(pair, 2)
    codes = np.stack([HashFunctions("dwta", 60, 1, 40, seed).codes(pair) for seed in range(3000)])
    # One table of each draw: those that borrow from one bin are not independent.
    table = codes[np.arange(3000), :, np.arange(3000) % 40]
    assert close(int((table[:, 0] == table[:, 1]).sum()), 3000, p)


HASHES = [
    HashFunctions("simhash", 16, 5, 7, 1),
    HashFunctions("dwta", 16, 5, 7, 1),
    HashFunctions("dwta", 16, 3, 40, 1, width=5),
    HashFunctions("dwta", 16, 6, 40, 1, width=8),  # 262,144 buckets
]
VALUES = st.one_of(st.just(0.0), st.floats(-4, 4, width=32, allow_subnormal=False), st.sampled_from([1.0, -1.0]))


@pytest.mark.parametrize("hashes", HASHES)
@given(hnp.arrays(np.float32, st.tuples(st.integers(0, 20), st.just(16)), elements=VALUES))
def test_a_vector_has_one_code_whatever_is_beside_it(hashes: HashFunctions, vectors: np.ndarray) -> None:
    codes = hashes.codes(vectors)
    assert codes.shape == (len(vectors), hashes.tables)
    assert (codes < hashes.buckets).all()
    for row in range(0, len(vectors), 7):
        np.testing.assert_array_equal(hashes.codes(vectors[row : row + 1])[0], codes[row])


@settings(deadline=None)
@given(st.integers(2, 40), st.integers(1, 6), st.integers(1, 60), st.integers(2, 5))
def test_bins_of_a_permutation_do_not_overlap_and_a_tables_functions_come_from_different_ones(
    dimension: int, bits: int, tables: int, width: int
) -> None:
    width = min(width, dimension)
    hashes = HashFunctions("dwta", dimension, bits, tables, 3, width)
    bins = hashes.coordinates.reshape(bits, tables, width)
    each = dimension // width
    for cut in (bins[:, start : start + each].reshape(bits, -1) for start in range(0, tables, each)):
        assert all(len(set(row.tolist())) == cut.shape[1] for row in cut)


@pytest.mark.parametrize(
    "change", [{"bits": 29}, {"bits": 0}, {"width": 20}, {"family": "dwta", "bits": 10, "width": 8}]
)
def test_what_has_no_tables_is_refused(change: dict) -> None:
    with pytest.raises(ValueError, match=r"buckets|bins"):
        HashFunctions(**{"family": "dwta", "dimension": 8, "bits": 2, "tables": 3, "seed": 0, "width": 2, **change})


def test_vectors_of_another_dimension_are_refused() -> None:
    with pytest.raises(ValueError, match="these functions hash"):
        HASHES[0].codes(np.zeros((3, 4)))
