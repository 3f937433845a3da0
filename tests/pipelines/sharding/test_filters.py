import pytest

from pipelines.sharding.plans import parse_filter
from schemas.errors import InputError


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
