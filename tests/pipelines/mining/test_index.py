import faiss
import numpy as np
import pytest

from pipelines.mining.index import build, choose
from schemas.errors import InputError


def test_few_labels_or_few_queries_are_searched_exactly():
    assert choose("auto", 15_562, 50_000, None) == "exact"
    assert choose("auto", 1_000_000, 100, None) == "exact"
    assert choose("auto", 1, 1, None) == "exact"


def test_many_labels_and_queries_get_inverted_lists():
    assert choose("auto", 1_000_000, 1_000_000, None) == "IVF4000,Flat"
    assert choose("auto", 1_000_000, 1_000_000, 4000) == "exact"  # every list probed is exact search and more


def test_a_given_index_is_kept():
    assert choose("HNSW32", 10, 10, None) == "HNSW32"
    assert choose("exact", 10**7, 10**7, None) == "exact"


def test_the_same_block_and_seed_give_the_same_index():
    vectors = np.random.default_rng(0).standard_normal((70_000, 4)).astype(np.float32)
    first, second, other = (faiss.serialize_index(build("IVF16,Flat", vectors, 4, seed)) for seed in (1, 1, 2))
    assert (first == second).all()
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("spec", "nprobe", "message"),
    [
        ("NOPE", None, r"index 'NOPE' cannot be made for 8 dimensions: .*Faiss factory string such as"),
        ("IVF64,Flat", None, r"index 'IVF64,Flat' cannot be built on a block of 50 vectors: .*or auto"),
        ("Flat", 4, r"index 'Flat' has no inverted lists, so nprobe=4"),
    ],
)
def test_an_index_that_cannot_be_is_refused(spec, nprobe, message):
    vectors = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    with pytest.raises(InputError, match=message):
        build(spec, vectors, nprobe, 0)


def test_nprobe_is_capped_at_the_number_of_lists():
    vectors = np.random.default_rng(0).standard_normal((200, 8)).astype(np.float32)
    assert faiss.extract_index_ivf(build("IVF4,Flat", vectors, None, 0)).nprobe == 4
    assert faiss.extract_index_ivf(build("IVF4,Flat", vectors, 2, 0)).nprobe == 2
