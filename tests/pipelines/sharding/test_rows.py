import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sharding.rejects import Reason
from pipelines.sharding.rows import order

# Hashes collide on purpose: different keys under one hash are no duplicates.
ROWS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abcd")), max_size=15)


@settings(deadline=None)
@given(ROWS.flatmap(lambda rows: st.permutations(list(enumerate(rows)))))
def test_order_is_total_and_keeps_the_first_of_each_key(arrived: list[tuple[int, tuple[int, str]]]) -> None:
    table = pa.table(
        {
            "hash": pa.array([ord(key) % 3 for _, (_, key) in arrived], pa.uint64()),
            "key": pa.array([key for _, (_, key) in arrived], pa.string()),
            "row": pa.array([row for row, _ in arrived], pa.int64()),
        }
    )
    ordered, rejects = order(table, "f")
    first = {key: min(row for row, (_, other) in arrived if other == key) for _, (_, key) in arrived}
    expected = sorted((ord(key) % 3, key, row) for key, row in first.items())
    assert [tuple(row.values()) for row in ordered.to_pylist()] == expected
    assert sorted(reject.line - 1 for reject in rejects) == sorted(
        row for row, (_, key) in arrived if row != first[key]
    )
    for reject in rejects:
        key = next(key for row, (_, key) in arrived if row == reject.line - 1)
        assert reject.reason is Reason.DUPLICATE_UID
        assert reject.detail == f"the uid '{key}' is that of line {first[key] + 1}"
