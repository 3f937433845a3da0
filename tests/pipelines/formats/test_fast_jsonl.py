"""The fast way of reading points gives what the slow one gives, or nothing."""

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats import from_lines
from pipelines.formats.base import Fields, Parsed, Part

FIELDS = Fields()
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
KEY = st.text("abé😀\0\n", min_size=1, max_size=4)
POINT = st.fixed_dictionaries(
    {"key": KEY, "text": TEXT, "labels": st.lists(KEY.filter(str.strip), min_size=1, max_size=6)},
    optional={"other": st.one_of(st.none(), st.integers(), TEXT, st.lists(st.integers(), max_size=2))},
)
ODD: Any = st.sampled_from([None, 7, True, [], "", "x", ["a", None], ["", "a"], [1], {"key": "a"}, "\ud800", 1e300])
NEAR = st.fixed_dictionaries({}, optional=dict.fromkeys(("key", "text", "labels", "title", "content"), ODD))


def slow(lines: list[bytes], first: int) -> Parsed:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_lines, "_parse_simple_block", lambda *_: None)
        raw = pa.record_batch({"line": pa.array(lines, pa.large_binary())})
        return from_lines.parse_points(raw, first, Part("train", "f", {}), FIELDS, "title+content")


@settings(deadline=None)
@given(st.lists(POINT, min_size=1, max_size=8), st.integers(0, 1 << 40), st.booleans())
def test_plain_points_are_read_the_fast_way(points: list[dict[str, Any]], first: int, escaped: bool) -> None:
    lines = [json.dumps(point, ensure_ascii=escaped).encode() for point in points]
    expected = slow(lines, first)
    assert expected.rejects == []
    got = from_lines._parse_simple_block(lines, first, FIELDS)
    assert got is not None
    got.validate(full=True)
    assert got.equals(expected.batch)


@settings(deadline=None)
@given(st.lists(POINT.map(json.dumps) | NEAR.map(json.dumps) | st.text('{}[]":,a\\1 \x01', max_size=12), max_size=6))
def test_whatever_else_is_left_alone_or_the_same(lines: list[str]) -> None:
    raw = [line.encode() for line in lines]
    got = from_lines._parse_simple_block(raw, 3, FIELDS)
    expected = slow(raw, 3)
    assert got is None or (got.equals(expected.batch) and expected.rejects == [])


GOOD = b'{"key": "a", "text": "b", "labels": ["c"]}'


@pytest.mark.parametrize(
    "lines",
    [
        [GOOD + GOOD, b'{"key": "a", "text": "b",', b'"labels": ["c"]}'],
        [b'{"key": "a", "text": "b", "labels": ["c"], "x":', GOOD + b"}"],
        [GOOD + b" " + GOOD, b""],
        [b'{"key": "a", "key": "z", "text": "b", "labels": ["c"]}'],
        [b'{"key": "a", "text": "\xff", "labels": ["c"]}'],
        [b'{"key": "a", "text": "b", "labels": ["\xc3"]}'],
        [b'{"key": "a", "text": "b", "labels": ["c"], "\x01row": 5}'],
        [b'{"key": "a", "text": "b", "labels": ["c"], "\\u0001row": 0}'],
        [b"{}"],
        [GOOD[:-1]],
        [b'{"key": "a", "text": "b", "labels": [["c"]]}'],
    ],
)
def test_tricks(lines: list[bytes]) -> None:
    got = from_lines._parse_simple_block(lines, 0, FIELDS)
    expected = slow(lines, 0)
    assert got is None or (got.equals(expected.batch) and expected.rejects == [])
