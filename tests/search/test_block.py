import itertools
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.ragged import Ragged
from search import topk
from search.exclusions import Exclusions, Subbatches, start_search
from search.index import Factory, SearchParams, build, set_params
from search.topk import Block, best, configure_faiss, merge, score, search, search_exactly, unpack
from tests.pipelines.mining.world import brute_force, random_rows


def ragged(rows):
    return Ragged(np.asarray([v for row in rows for v in row], np.int64), np.cumsum([0, *map(len, rows)]))


def built(spec, vectors, nprobe):
    index = build(Factory(spec), vectors, seed=0)
    set_params(index, SearchParams(nprobe=nprobe))
    return index


def exclusions(positives, filters):
    return Exclusions(ragged(positives), ragged(filters), Ragged.empty(len(positives)))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    labels=st.integers(1, 60),
    rows=st.integers(1, 12),
    dimension=st.integers(1, 9),
    width=st.integers(1, 20),
    blocks=st.integers(1, 4),
    levels=st.integers(1, 4),
)
def test_exact_search_is_brute_force_with_any_number_of_ties(seed, labels, rows, dimension, width, blocks, levels):
    """Small whole numbers make exact scores and many ties; blocks must not show."""
    generator = np.random.default_rng(seed)
    vectors = generator.integers(-levels + 1, levels, (labels, dimension)).astype(np.float32)
    queries = generator.integers(-levels + 1, levels, (rows, dimension)).astype(np.float32)
    positives, filters = (random_rows(generator, rows, labels, most) for most in (labels, 3))
    edges = [labels * i // blocks for i in range(blocks + 1)]
    parts = [
        start_search(Block(low, vectors[low:high]), queries, exclusions(positives, filters), width)()
        for low, high in itertools.pairwise(edges)
        if high > low
    ]
    label_ids, scores = unpack(merge(parts, width))
    gone = [{*a, *b} for a, b in zip(positives, filters, strict=True)]
    expected = brute_force(queries @ vectors.T, gone, width)
    assert label_ids.tolist() == expected.tolist()
    held = np.take_along_axis(queries @ vectors.T, np.maximum(expected, 0), axis=1)
    assert (scores == np.where(expected < 0, -np.inf, held)).all()


def test_a_score_depends_on_its_pair_alone():
    generator = np.random.default_rng(1)
    queries, vectors = (generator.standard_normal((n, 67)).astype(np.float32) for n in (50, 300))
    positions = generator.integers(0, 300, (50, 40))
    whole = score(queries, vectors, positions)
    part = score(queries[7:9], vectors[positions[7, 3] :], np.zeros((2, 1), np.int64))
    assert part[0, 0] == whole[7, 3]
    assert np.allclose(whole, np.einsum("bd,bcd->bc", queries, vectors[positions]), atol=1e-4)
    assert (score(queries, vectors, np.full((50, 2), -1)) == -np.inf).all()


@pytest.mark.parametrize("nprobe", [1, 3])
def test_rows_that_their_lists_leave_short_are_searched_exactly(nprobe):
    generator = np.random.default_rng(2)
    vectors = generator.standard_normal((400, 8)).astype(np.float32)
    queries = generator.standard_normal((30, 8)).astype(np.float32)
    block = Block(0, vectors, built("IVF20,Flat", vectors, nprobe))
    keys = search(block, queries, 90)
    label_ids, _ = unpack(keys)
    assert (label_ids >= 0).all()
    assert all(len(set(row)) == 90 for row in label_ids.tolist())
    assert (np.sort(keys, axis=1) == keys).all()
    _, positions = block.index.search(queries, 98)
    short = (positions >= 0).sum(axis=1) < 90
    assert short.any()
    assert (keys[short] == search_exactly(block, queries[short], 90)).all()


def test_one_row_with_many_positives_keeps_its_width_and_is_counted():
    generator = np.random.default_rng(3)
    vectors = generator.standard_normal((300, 8)).astype(np.float32)
    queries = generator.standard_normal((9, 8)).astype(np.float32)
    scores = queries @ vectors.T
    top = np.argsort(-scores, axis=1)
    positives = [top[i, :200].tolist() if i == 4 else top[i, :1].tolist() for i in range(9)]
    filters = [top[i, 1:3].tolist() if i == 0 else [] for i in range(9)]
    counts: Counter[str] = Counter()
    keys = start_search(Block(0, vectors), queries, exclusions(positives, filters), 7, counts)()
    assert (
        unpack(keys)[0] == brute_force(scores, [{*a, *b} for a, b in zip(positives, filters, strict=True)], 7)
    ).all()
    assert (counts["positives_dropped"], counts["filtered_dropped"]) == (208, 2)
    # Rows of one tier share their fetch: 8 rows at 7 + 3, one at 7 + 200.
    assert counts["candidates"] == 8 * 10 + 207


def test_approximate_search_scores_as_exact_search_does():
    generator = np.random.default_rng(4)
    vectors = generator.standard_normal((600, 16)).astype(np.float32)
    queries = generator.standard_normal((20, 16)).astype(np.float32)
    index = built("IVF8,PQ4x4", vectors, 8)
    label_ids, scores = unpack(search(Block(0, vectors, index), queries, 10))
    assert np.allclose(scores, np.take_along_axis(queries @ vectors.T, label_ids, axis=1), atol=1e-4)
    assert (np.diff(scores, axis=1) <= 0).all()
    all_ids, exact = unpack(best(search_exactly(Block(0, vectors), queries, 600), 600))
    scores_of = [dict(zip(a, b, strict=True)) for a, b in zip(all_ids.tolist(), exact.tolist(), strict=True)]
    assert [[scores_of[i][label] for label in row] for i, row in enumerate(label_ids.tolist())] == scores.tolist()


@given(seed=st.integers(0, 2**32 - 1), threads=st.integers(1, 3), most=st.integers(1, 9), data=st.data())
def test_parts_that_threads_search_are_the_batch(seed, threads, most, data):
    """Rows of one batch share what they fetch, however they are cut and whichever part is done first."""
    generator = np.random.default_rng(seed)
    vectors, queries = (generator.integers(-3, 4, (n, 4)).astype(np.float32) for n in (200, 12))
    positives = [generator.choice(200, data.draw(st.sampled_from([0, 2, 40]))).tolist() for _ in queries]
    dropped = exclusions(positives, [[int(row)] for row in range(12)])
    block = Block(0, vectors, data.draw(st.sampled_from([None, built("IVF8,Flat", vectors, 3)])))
    plain: Counter[str] = Counter()
    cut: Counter[str] = Counter()
    expected = start_search(block, queries, dropped, 7, plain, 2)()
    with ThreadPoolExecutor(threads, initializer=configure_faiss, initargs=(1,)) as pool:
        waits = [start_search(block, queries, dropped, 7, cut, 2, Subbatches(pool.map, most)) for _ in range(2)]
        assert all((wait() == expected).all() for wait in waits)
    assert cut == plain + plain


def test_a_forked_child_searches_without_the_threads_of_its_parent():
    generator = np.random.default_rng(0)
    vectors, queries = (generator.standard_normal((n, 16), np.float32) for n in (5_000, 300))
    block = Block(0, vectors, built("IVF32,Flat", vectors, 8))
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(2)
    try:
        expected = search(block, queries, 10)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            os._exit(0 if np.array_equal(search(block, queries, 10), expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        faiss.omp_set_num_threads(threads)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    dimension=st.sampled_from([3, 16, 33, 64]),
    rows=st.integers(1, 5),
    width=st.sampled_from([1, 30]),
    kind=st.sampled_from(["normal", "ties", "bias", "zeros"]),
    dtype=st.sampled_from(["float32", "float16"]),
)
def test_a_byte_a_number_finds_what_exact_search_does(seed, dimension, rows, width, kind, dtype):
    generator = np.random.default_rng(seed)
    vectors = generator.standard_normal((5000, dimension))
    queries = generator.standard_normal((rows, dimension)).astype(np.float32)
    if kind == "ties":
        vectors, queries = np.rint(vectors), np.rint(queries)
    elif kind == "bias":  # of another size than all else
        vectors[:, -1], queries[:, -1] = vectors[:, -1] * 50 - 9, 1
    elif kind == "zeros":
        vectors[:, 0] = vectors[7] = queries[0] = 0
    vectors = vectors.astype(dtype)
    coded = Block(3, vectors, coded=True)
    assert coded.codes is not None
    assert coded.longest == pytest.approx(Block(3, vectors).longest)
    np.testing.assert_array_equal(
        search_exactly(coded, queries, width), search_exactly(Block(3, vectors), queries, width)
    )


@pytest.mark.parametrize("free", [3 * 5000 * 8, 3 * 5000 * 8 - 1])
def test_free_memory_allows_codes_of_any_size(free, monkeypatch):
    monkeypatch.setattr(topk, "free_memory", lambda: free)
    generator = np.random.default_rng(7)
    vectors, queries = (generator.standard_normal((n, 8)).astype(np.float32) for n in (5000, 3))
    coded = Block(0, vectors, coded=True)
    assert (coded.codes is not None) == (free >= 3 * vectors.size)
    np.testing.assert_array_equal(search_exactly(coded, queries, 9), search_exactly(Block(0, vectors), queries, 9))


def test_what_is_no_number_has_no_codes():
    vectors = np.ones((5000, 8), np.float32)
    vectors[77, 3] = -np.nan
    assert Block(0, vectors, coded=True).codes is None
