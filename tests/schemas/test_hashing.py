import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.hashing import combine, hash_strings

MASK = (1 << 64) - 1


def mix(z: int) -> int:
    """SplitMix64 as its authors write it."""
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def plain(value: bytes, seed: int) -> int:
    state = mix(seed ^ mix(len(value)))
    for start in range(0, len(value), 8):
        state = mix(state ^ int.from_bytes(value[start : start + 8], "little"))
    return state


def test_splitmix_has_its_published_values() -> None:
    assert [mix(0), mix(mix(0) * 0 + 0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@settings(deadline=None)
@given(st.lists(st.text(max_size=40), max_size=20), st.integers(0, MASK), st.integers(0, 5))
def test_a_column_hashes_like_its_values_one_by_one(values: list[str], seed: int, start: int) -> None:
    for kind in (pa.string(), pa.large_string()):
        column = pa.array(values, kind).slice(start)
        assert hash_strings(column, seed).tolist() == [plain(value.encode(), seed) for value in values[start:]]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=9), st.integers(0, 4))
def test_lists_hash_like_their_bytes(rows: list[list[int]], start: int) -> None:
    column = pa.array(rows, pa.list_(pa.int32())).slice(start)
    expected = [plain(np.asarray(row, np.int32).tobytes(), 3) for row in rows[start:]]
    assert hash_strings(column, 3).tolist() == expected


def test_long_values_differ_and_do_not_touch_their_neighbours() -> None:
    values = ["a", "x" * 600, "x" * 599 + "y", "b", "x" * 5_000_000]
    hashes = hash_strings(pa.array(values), 0)
    assert len(set(hashes.tolist())) == 5
    assert hashes.tolist() == [int(hash_strings(pa.array([value]), 0)[0]) for value in values]


def test_hashes_spread_evenly_over_shards_and_seeds() -> None:
    keys = pa.array([f"A{i}" for i in range(8000)])
    shards = hash_strings(keys, 0) % np.uint64(8)
    assert np.bincount(shards.astype(np.int64)).min() > 880  # 1000 ± 4 standard deviations
    other = hash_strings(keys, 1) % np.uint64(8)
    assert 0.1 < np.mean(shards == other) < 0.15
    both = combine(shards, other)
    assert len(set(both.tolist())) == 64
    assert combine(shards[:1], other[:1]) != combine(other[:1], shards[:1]) or shards[0] == other[0]
