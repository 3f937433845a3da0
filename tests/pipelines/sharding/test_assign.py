import hashlib

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sharding import assign
from pipelines.sharding.frequencies import count_labels, sum_counts


def test_the_hash_is_salted_blake2b() -> None:
    expected = hashlib.blake2b("key é".encode(), digest_size=8, salt=(5).to_bytes(8, "little")).digest()
    got = assign.hash_keys(["key é", "other"], 5)
    assert got.dtype == np.uint64
    assert int(got[0]) == int.from_bytes(expected, "little")
    assert got[0] != assign.hash_keys(["key é"], 6)[0]
    assert len(assign.hash_keys([], 0)) == 0


def test_shards_come_out_even() -> None:
    shards = assign.hash_keys([f"A{i}" for i in range(8000)], 0) % np.uint64(8)
    assert np.bincount(shards.astype(np.int64)).min() > 880  # 1000 ± 4 standard deviations


def test_defaults() -> None:
    assert [assign.default_shards(rows) for rows in (0, 1 << 18, 1 << 20, (1 << 20) + 1)] == [4, 4, 4, 5]
    assert [assign.default_row_group_rows(rows) for rows in (10, 999_999, 1_000_000)] == [1024, 1024, 8192]
    assert [assign.block_lines(shards) for shards in (4, 100, 10_000)] == [4096, 6400, 65536]


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=40))
def test_split_keeps_every_row_in_order(parts: list[int]) -> None:
    batch = pa.record_batch({"i": pa.array(range(len(parts)), pa.int64())})
    got = {part: some["i"].to_pylist() for part, some in assign.split_by(batch, np.asarray(parts, np.int64))}
    assert got == {part: [i for i, p in enumerate(parts) if p == part] for part in sorted(set(parts))}


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 22), max_size=30), max_size=4), st.integers(1, 9))
def test_counts_by_block_add_up(shards: list[list[int]], block: int) -> None:
    parts = [part for ids in shards for part in count_labels(np.asarray(ids, np.int32), block)]
    total = [
        sum_counts((batch for b, batch in parts if b == number), number * block, min(block, 23 - number * block))
        for number in range(-(-23 // block))
    ]
    assert np.concatenate(total).tolist() == [sum(ids.count(label) for ids in shards) for label in range(23)]
