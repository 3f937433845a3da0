import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError
from search.index import (
    Factory,
    Lift,
    SearchParams,
    build,
    require_applicable,
    set_params,
    tune,
)
from search.topk import Block, search_exactly, search_index, unpack


def vectors(rows, dimension, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, dimension)).astype(np.float32)


@pytest.mark.parametrize("spec", ["IVF16,Flat", "IVF16,PQ2x4fs", "HNSW8", "IVF16_HNSW8,SQ8"])
def test_the_same_block_and_seed_give_the_same_index(spec):
    rows = vectors(70_000 if spec == "IVF16,Flat" else 3_000, 4)
    threads = faiss.omp_get_max_threads()
    try:
        indexes = []
        for number in (1, 2):
            faiss.omp_set_num_threads(number)
            indexes.append(faiss.serialize_index(build(Factory(spec), rows, seed=1)))
    finally:
        faiss.omp_set_num_threads(threads)
    assert (indexes[0] == indexes[1]).all()


def test_another_seed_draws_another_training_sample():
    rows = vectors(70_000, 4)
    first, other = (faiss.serialize_index(build(Factory("IVF16,Flat"), rows, seed)) for seed in (1, 2))
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("NOPE", r"index 'NOPE' cannot be built for 8 dimensions: .*Faiss factory string such as"),
        ("IVF64,Flat", r"index 'IVF64,Flat' cannot be built on a block of 50 vectors: .*or auto"),
    ],
)
def test_an_index_that_cannot_be_is_refused(spec, message):
    with pytest.raises(InputError, match=message):
        build(Factory(spec), vectors(50, 8), 0)


@pytest.mark.parametrize(
    ("spec", "params", "message"),
    [
        ("Flat", SearchParams(nprobe=4), r"index 'Flat' has no inverted lists, so nprobe=4"),
        ("IVF4,Flat", SearchParams(ef_search=4), r"index 'IVF4,Flat' is not a graph, so ef_search=4"),
        ("IVF4_HNSW8,Flat", SearchParams(ef_search=4), "is not a graph"),
        ("exact", SearchParams(refine=4), "'exact' is exact already, so refine=4"),
    ],
)
def test_an_option_that_means_nothing_is_refused(spec, params, message):
    with pytest.raises(InputError, match=message):
        require_applicable(Factory(spec), params)


@pytest.mark.parametrize(
    ("spec", "lists", "lossy", "graph", "subquantizers"),
    [
        ("exact", 0, False, False, 1),
        ("Flat", 0, False, False, 1),
        ("HNSW32", 0, False, True, 1),
        ("IVF4096,Flat", 4096, False, False, 1),
        ("IVF4096,PQ32x4fs", 4096, True, False, 32),
        ("OPQ16_64,IVF65536_HNSW32,PQ16x4fsr", 65536, True, True, 16),
        ("IVF100,SQ8", 100, True, False, 1),
    ],
)
def test_a_factory_string_is_read(spec, lists, lossy, graph, subquantizers):
    factory = Factory.parse(spec)
    assert (factory.lists, factory.lossy, factory.has_graph, factory.subquantizers) == (
        lists,
        lossy,
        graph,
        subquantizers,
    )


@pytest.mark.parametrize("width", [10, 80])
def test_the_recall_that_is_tuned_is_that_of_the_lists(width):
    """Rows whose lists hold too few labels would be searched exactly: cheap lists that find little are no bargain."""
    rows, queries = vectors(256, 8), vectors(100, 8, seed=1)
    block = Block(0, rows, build(Factory("IVF16,Flat"), rows, seed=0))
    params = tune(block, SearchParams(), False, queries, width, 0.9)
    set_params(block.index, params)
    found, exact = (
        unpack(search_index(block, queries, width, 1)[0])[0],
        unpack(search_exactly(block, queries, width))[0],
    )
    assert np.mean([len({*some} & {*all_}) / width for some, all_ in zip(found, exact, strict=True)]) >= 0.9


def test_refinement_is_minings_own():
    assert Factory.parse("IVF64,PQ8x4fs,RFlat") == Factory.parse(" IVF64,PQ8x4fs") == Factory("IVF64,PQ8x4fs")


def test_vectors_are_padded_to_what_a_product_quantizer_takes():
    assert [Factory("IVF4,PQ4x4fs").dimension(d) for d in (7, 8, 9)] == [8, 8, 12]
    assert Factory("IVF4,Flat").dimension(9) == Factory("exact").dimension(9) == 9


@given(st.integers(1, 40), st.integers(1, 9), st.floats(0, 50), st.integers(0, 3), st.integers(0, 99))
def test_distances_of_lifted_vectors_are_inner_products(rows, dimension, bias, more, seed):
    """Less a number that all vectors share, so that both give the same order."""
    given_rows, queries = vectors(rows, dimension, seed) - np.float32(bias), vectors(5, dimension, seed + 1)
    lift = Lift.of(given_rows, queries)
    lifted = lift.apply(given_rows, dimension + 1 + more).astype(np.float64)
    wide = np.pad(queries, [(0, 0), (0, 1 + more)])
    distances = ((wide[:, None] - lifted) ** 2).sum(axis=2)
    products = lift.scale * queries.astype(np.float64) @ (given_rows - lift.centre).astype(np.float64).T
    shared = (queries.astype(np.float64) ** 2).sum(axis=1)[:, None] + lift.radius**2
    np.testing.assert_allclose(distances, shared - 2 * products, rtol=1e-4, atol=1e-4)


def test_lists_of_lifted_vectors_find_more():
    """By inner product, long vectors are in the lists of queries that are not near them."""
    draw = np.random.default_rng(0)
    centres, lengths = draw.standard_normal((100, 8)), draw.lognormal(0, 0.8, (3000, 1))
    rows = (lengths * (centres.repeat(30, axis=0) + 0.3 * vectors(3000, 8))).astype(np.float32)
    queries = (centres[:60] + 0.3 * vectors(60, 8, seed=1)).astype(np.float32)
    recalls = []
    for lift in (None, Lift.of(rows, queries)):
        block = Block(0, rows, build(Factory("IVF64,Flat"), rows, 0, lift))
        recalls.append(tune(block, SearchParams(nprobe=8), False, queries, 10, 0.95).recall)
    assert recalls[1] > recalls[0] + 0.1
