import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sharding.rows import order_rows

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True).map(sorted)
# Hashes collide on purpose: different keys under one hash are no duplicates.
ROWS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2), LABELS), max_size=15)
ARRIVED = ROWS.flatmap(lambda rows: st.permutations(list(enumerate(rows))))


def table_of(arrived: list[tuple[int, tuple[str, int, list[int]]]]) -> pa.Table:
    columns = {
        "hash": pa.array([ord(key) % 3 for _, (key, _, _) in arrived], pa.uint64()),
        "key": pa.array([key for _, (key, _, _) in arrived], pa.string()),
        "content": pa.array([content for _, (_, content, _) in arrived], pa.uint64()),
        "part": pa.array([0] * len(arrived), pa.int32()),
        "row": pa.array([row for row, _ in arrived], pa.int64()),
        "label_ids": pa.array([labels for _, (_, _, labels) in arrived], pa.list_(pa.int32())),
    }
    return pa.table(columns)


def plain(arrived: list[tuple[int, tuple[str, int, list[int]]]]) -> dict[str, tuple[int, set[int]]]:
    """By key its smallest content, and the labels of all rows with it."""
    ordered: dict[str, tuple[int, set[int]]] = {}
    for key in {key for _, (key, _, _) in arrived}:
        least = min(content for _, (k, content, _) in arrived if k == key)
        rows = [labels for _, (k, content, labels) in arrived if (k, content) == (key, least)]
        ordered[key] = least, {label for labels in rows for label in labels}
    return ordered


@settings(deadline=None)
@given(ARRIVED)
def test_order_is_total_and_keeps_each_key_once(arrived: list[tuple[int, tuple[str, int, list[int]]]]) -> None:
    ordered = order_rows(table_of(arrived))
    expected = plain(arrived)
    got = [(row["hash"], row["key"], row["content"], row["label_ids"]) for row in ordered.rows.to_pylist()]
    assert got == sorted((ord(key) % 3, key, content, sorted(labels)) for key, (content, labels) in expected.items())
    others = [(row, key) for row, (key, content, _) in arrived if content != expected[key][0]]
    assert sorted((row["row"], row["key"]) for row in ordered.rejected.to_pylist()) == sorted(others)
    for lost, kept in zip(ordered.rejected.to_pylist(), ordered.kept.to_pylist(), strict=True):
        same = [row for row, (key, content, _) in arrived if (key, content) == (lost["key"], expected[key][0])]
        assert (kept["key"], kept["row"]) == (lost["key"], min(same))
    assert ordered.merged == len(arrived) - len(expected) - len(others)
