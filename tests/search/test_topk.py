"""Every exact top-k finds what sorting all scores in float64 finds; keys sort as scores."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas import PAD
from schemas.errors import ExtremisError, InputError
from schemas.ragged import Ragged
from scoring import scan
from search import topk, torch_topk
from search.topk import EMPTY, MOST_LABELS, Block, best, find_device, merge, pack, score, search_exactly, unpack
from search.torch_topk import top_k
from trainer.evaluation import ranking
from trainer.evaluation.ranking import LabelRows, filtered_top_k

Found = tuple[np.ndarray, np.ndarray]  # ids and scores [B, k]


def in_blocks(queries: np.ndarray, vectors: np.ndarray, k: int) -> np.ndarray:
    starts = range(0, max(1, len(vectors)), 7)
    return merge([search_exactly(Block(low, vectors[low : low + 7]), queries, k) for low in starts], k)


def by_scan(queries: np.ndarray, vectors: np.ndarray, k: int, has_dot: bool) -> np.ndarray:
    """By compiled loops, with or without the processor's instruction."""
    block = Block(0, vectors, coded=True)
    coded = scan.CodedBlock.of(block)
    if coded is None:
        return search_exactly(block, queries, k)
    keys = [np.empty((0, k), np.uint64)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "_HAS_DOT", scan._HAS_DOT and has_dot)
        for query in queries:
            scores, ids = coded.scan(query[None]).best(k, np.empty(0, bool))
            keys.append(best(pack(ids, scores), k))
    return np.concatenate(keys)


# What gives keys, with the constants of search/topk.py that lead there.
OF_KEYS: dict[str, tuple[Callable[..., np.ndarray], dict[str, object]]] = {
    "NumPy": (lambda x, w, k: search_exactly(Block(0, w), x, k), {"_MANY": 1 << 20, "_MANY_ALONE": 1 << 20}),
    "NumPy in steps": (lambda x, w, k: search_exactly(Block(0, w), x, k), {"_SCORES": 1, "_SLACKS": (0, 1)}),
    "Faiss": (lambda x, w, k: search_exactly(Block(0, w), x, k), {"_MANY": 0, "_MANY_ALONE": 0}),
    "Faiss in steps": (lambda x, w, k: search_exactly(Block(0, w), x, k), {"_MANY": 0, "_WIDENED": 16}),
    "blocks": (in_blocks, {}),
    "codes": (
        lambda x, w, k: search_exactly(Block(0, w, coded=True), x, k),
        {"_CODED": 1, "_CODED_SLACKS": (1, 3)},
    ),
    "compiled": (lambda x, w, k: by_scan(x, w, k, True), {"_CODED": 1}),
    "compiled for any processor": (lambda x, w, k: by_scan(x, w, k, False), {"_CODED": 1}),
    "a device": (lambda x, w, k: search_exactly(Block(0, w, device="cpu:0"), x, k), {}),
}


def by_torch(x: np.ndarray, w: np.ndarray, k: int, dtype: torch.dtype | None = None) -> Found:
    scores, ids = top_k(torch.from_numpy(x), torch.from_numpy(w).to(dtype), k, block_rows=7)
    return ids.numpy(), scores.numpy()


def by_evaluation(x: np.ndarray, w: np.ndarray, k: int) -> Found:
    return filtered_top_k(torch.from_numpy(x), LabelRows(torch.from_numpy(w)), k, Ragged.empty(len(x)))[::-1]


IMPLEMENTATIONS: dict[str, Callable[[np.ndarray, np.ndarray, int], Found]] = {
    **{name: lambda x, w, k, find=find: unpack(find(x, w, k)) for name, (find, _) in OF_KEYS.items()},
    "PyTorch": by_torch,
    "PyTorch, bfloat16": lambda x, w, k: by_torch(x, w, k, torch.bfloat16),
    "evaluation": by_evaluation,
}


@contextlib.contextmanager
def on_the_way_of(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in OF_KEYS[name][1].items() if name in OF_KEYS else ():
            patch.setattr(topk, constant, value)
        patch.setattr(torch_topk, "_SCORES", 64)
        patch.setattr(torch_topk, "_SORTED", 64)
        patch.setattr(ranking, "_MANY_QUERIES", 1)
        patch.setattr(ranking, "_MANY_ROWS", 1)
        yield


def sorted_in_double(queries: np.ndarray, vectors: np.ndarray, k: int) -> Found:
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    order = np.lexsort((np.broadcast_to(np.arange(len(vectors)), scores.shape), -scores))[:, :k]
    room = [(0, 0), (0, k - order.shape[1])]
    scores = np.take_along_axis(scores, order, 1)
    return np.pad(order, room, constant_values=PAD), np.pad(scores, room, constant_values=-np.inf)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@given(st.integers(0, 6), st.integers(0, 60), st.integers(1, 70), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_exact_top_k_is_a_sort(name: str, queries: int, rows: int, k: int, levels: int, half: bool, seed: int) -> None:
    """Small whole numbers are exact in any precision and order of summation, and tie."""
    draw = np.random.default_rng(seed)
    x, w = (draw.integers(1 - levels, levels, (count, 5)).astype(np.float32) for count in (queries, rows))
    with on_the_way_of(name):
        ids, scores = IMPLEMENTATIONS[name](x, w.astype(np.float16) if half else w, k)
    expected, in_double = sorted_in_double(x, w, k)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(scores, in_double)


@pytest.mark.parametrize("name", OF_KEYS)
@given(st.integers(1, 30), st.integers(1, 300), st.integers(1, 12), st.booleans(), st.integers(0, 99))
def test_keys_are_the_same_whatever_finds_them(
    name: str, queries: int, rows: int, k: int, half: bool, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    x, w = (draw.standard_normal((count, 8)).astype(np.float32) for count in (queries, rows))
    w = w.astype(np.float16) if half else w
    every = np.broadcast_to(np.arange(rows), (queries, rows))
    with on_the_way_of(name):
        keys = OF_KEYS[name][0](x, w, k)
    np.testing.assert_array_equal(keys, best(pack(every, score(x, w, every)), k))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("where", ["queries", "vectors"])
def test_what_is_not_a_number_is_refused(name: str, where: str) -> None:
    x, w = np.ones((6, 5), np.float32), np.ones((40, 5), np.float32)
    (x if where == "queries" else w)[3, 2] = np.nan
    with on_the_way_of(name), pytest.raises(ExtremisError, match="not a number"):
        IMPLEMENTATIONS[name](x, w, 2)


@pytest.mark.gpu
def test_a_gpu_finds_what_a_cpu_finds() -> None:
    draw = np.random.default_rng(1)
    vectors, x = (draw.standard_normal((rows, 64)).astype(np.float32) for rows in (50_000, 700))
    there = Block(0, vectors, None, find_device("auto"))
    np.testing.assert_array_equal(search_exactly(there, x, 50), search_exactly(Block(0, vectors), x, 50))


def test_a_device_that_is_not_there_is_refused() -> None:
    assert find_device("cpu") == "cpu"
    with pytest.raises(InputError, match="cuda:99"):
        find_device("cuda:99")


numbers = st.floats(width=32, allow_nan=False)
pairs = st.lists(st.tuples(numbers, st.integers(0, MOST_LABELS - 1)), min_size=1, max_size=30)


@given(pairs)
def test_keys_sort_by_score_down_then_label_up(candidates: list[tuple[float, int]]) -> None:
    values, labels = zip(*candidates, strict=True)
    keys = pack(np.asarray(labels, np.int64), np.asarray(values, np.float32))
    ids, scores = unpack(keys)
    assert list(zip(scores.tolist(), ids.tolist(), strict=True)) == candidates
    ids, scores = unpack(np.sort(keys))
    expected = sorted(candidates, key=lambda first: (-first[0], first[1]))
    assert list(zip(scores.tolist(), ids.tolist(), strict=True)) == expected


def test_the_two_zeros_tie_and_pads_sort_last() -> None:
    keys = pack(np.array([[7, 3, PAD, 5]]), np.array([[0.0, -0.0, 9.0, -np.inf]], np.float32))
    labels, values = unpack(best(keys, 6))
    assert labels.tolist() == [[3, 7, 5, PAD, PAD, PAD]]
    assert values.tolist() == [[0, 0, -np.inf, -np.inf, -np.inf, -np.inf]]


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 4))
def test_a_merge_does_not_depend_on_blocks_or_their_order(seed: int, width: int, blocks: int) -> None:
    generator = np.random.default_rng(seed)
    labels = np.arange(12)[None].repeat(3, axis=0)
    keys = pack(labels, generator.integers(-2, 3, (3, 12)).astype(np.float32))
    parts = np.array_split(keys, blocks, axis=1)
    generator.shuffle(parts)
    merged = merge([best(part, width) for part in parts], width)
    assert (merged == best(keys, width)).all()
    assert (merged != EMPTY).all()
