import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.flow import split_by
from pipelines.options import default_row_group_rows, default_shards
from pipelines.sharding.rows import count_labels, count_tokens, sum_counts


def test_defaults() -> None:
    assert [default_shards(rows, 0, 100) for rows in (0, 2, 1 << 18)] == [1, 2, 4]
    assert [default_shards(9, size, 100) for size in (400, 401, 1e6)] == [4, 5, 10_000]
    assert [default_row_group_rows(rows) for rows in (10, 999_999, 1_000_000)] == [1024, 1024, 8192]


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=40))
def test_split_keeps_every_row_in_order(parts: list[int]) -> None:
    batch = pa.record_batch({"i": pa.array(range(len(parts)), pa.int64())})
    got = {part: some["i"].to_pylist() for part, some in split_by(batch, np.asarray(parts, np.int64))}
    assert got == {part: [i for i, p in enumerate(parts) if p == part] for part in sorted(set(parts))}


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 22), max_size=30), max_size=4), st.lists(st.integers(0, 23), max_size=5))
def test_counts_by_shard_add_up(batches: list[list[int]], cuts: list[int]) -> None:
    """Empty shards among the labels too."""
    first = np.asarray([0, *sorted(cuts), 23])
    parts = [part for ids in batches for part in count_labels(np.asarray(ids, np.int32), first)]
    total = [
        sum_counts((batch for b, batch in parts if b == shard), int(first[shard]), int(first[shard + 1] - first[shard]))
        for shard in range(len(first) - 1)
    ]
    assert np.concatenate(total).tolist() == [sum(ids.count(label) for ids in batches) for label in range(23)]


def test_rows_without_tokens_are_counted() -> None:
    table = pa.table({"input_ids": [[1, 2], [], []], "feature_ids": [[], [3], []]})
    assert count_tokens(table) == {"tokens": 2, "features": 1, "empty_texts": 1}
