import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from schemas import PAD
from search.candidates import EMPTY, MOST_LABELS, best, merge, pack, unpack

scores = st.floats(width=32, allow_nan=False)
pairs = st.lists(st.tuples(scores, st.integers(0, MOST_LABELS - 1)), min_size=1, max_size=30)


def keys_of(candidates: list[tuple[float, int]]) -> np.ndarray:
    values, labels = zip(*candidates, strict=True)
    return pack(np.asarray(labels, np.int64), np.asarray(values, np.float32))


@given(pairs)
def test_keys_sort_by_score_down_then_label_up(candidates):
    labels, values = unpack(np.sort(keys_of(candidates)))
    expected = sorted(candidates, key=lambda first: (-first[0], first[1]))
    assert list(zip(values.tolist(), labels.tolist(), strict=True)) == expected


def test_the_two_zeros_tie_and_pads_sort_last():
    keys = pack(np.array([[7, 3, PAD, 5]]), np.array([[0.0, -0.0, 9.0, -np.inf]], np.float32))
    labels, values = unpack(best(keys, 6))
    assert labels.tolist() == [[3, 7, 5, PAD, PAD, PAD]]
    assert values.tolist() == [[0, 0, -np.inf, -np.inf, -np.inf, -np.inf]]


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 4))
def test_a_merge_does_not_depend_on_blocks_or_their_order(seed, width, blocks):
    generator = np.random.default_rng(seed)
    labels = np.arange(12)[None].repeat(3, axis=0)
    keys = pack(labels, generator.integers(-2, 3, (3, 12)).astype(np.float32))
    parts = np.array_split(keys, blocks, axis=1)
    generator.shuffle(parts)
    merged = merge([best(part, width) for part in parts], width)
    assert (merged == best(keys, width)).all()
    assert (merged != EMPTY).all()
