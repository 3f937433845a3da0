import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sharding.plans import parse_filter
from pipelines.sharding.rows import join_pairs
from schemas.errors import InputError

PAIRS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=30)


@settings(deadline=None)
@given(PAIRS, st.lists(st.integers(0, 9), max_size=12))
def test_join_equals_a_dictionary(pairs: list[tuple[int, int]], rows: list[int]) -> None:
    content = "".join(f"{row} {label}\n" for row, label in pairs).encode()
    parsed = parse_filter(content, "f", 10, 6)
    assert parsed.dtype == np.int64
    assert parsed.tolist() == sorted(map(list, set(pairs)))
    joined = join_pairs(np.asarray(rows, np.int64), parsed, pa.int32())
    assert joined.type == pa.list_(pa.int32())
    assert joined.to_pylist() == [sorted({label for r, label in pairs if r == row}) for row in rows]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0 1\n10 1\n", r"f, line 2: row 10 does not exist; the points have rows 0 to 9"),
        (b"0 6\n", r"f, line 1: label 6 does not exist; the labels are 0 to 5"),
        (b"0\n", r"f, line 1: expected two whole numbers `row label`, got '0'"),
        (b"0 1 2\n", "line 1: expected two whole numbers"),
        (b"0 -1\n", r"line 1: expected two whole numbers .*'0 -1'"),
        (b"\n\n1 one\n", "line 3: expected two whole numbers"),
        (b"\xff\xfe 1\n", "line 1: expected two whole numbers"),
        (b"1 " + b"9" * 5000, "line 1: expected two whole numbers"),
        ("² 1\n".encode(), "line 1: expected two whole numbers"),
    ],
)
def test_what_points_nowhere_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_filter(content, "f", 10, 6)
