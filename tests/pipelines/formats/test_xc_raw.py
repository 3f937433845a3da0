import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats.base import Parsed, Part, Reason
from pipelines.formats.xc import XC_RAW

LABELS = 10

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
POINT = st.fixed_dictionaries(
    {"title": TEXT, "target_ind": st.lists(st.integers(0, LABELS - 1), min_size=1, max_size=8)},
    optional={"uid": TEXT, "content": TEXT, "target_rel": st.lists(st.floats(allow_nan=False), max_size=3)},
)
LONE = st.text(st.sampled_from("a\0é\u2028\ud800\udfff😀"), max_size=5)
ODD = (
    LONE
    | st.lists(st.integers(-2, LABELS + 1), max_size=4)
    | st.sampled_from([None, True, 7, -1.5, {}, [[1]], ["a"], 1e400])
)
NEAR = st.fixed_dictionaries({}, optional=dict.fromkeys(("uid", "title", "content", "target_ind"), ODD))


def parse_points(lines: Sequence[bytes], first: int, file: str = "f", text: str = "title+content") -> Parsed:
    raw = pa.record_batch({"json": pa.array(lines, pa.large_binary())})
    return XC_RAW.parse(raw, first, Part("train", file, {"json": file}), text)


def parse_labels(lines: Sequence[bytes], first: int) -> Parsed:
    raw = pa.record_batch({"json": pa.array(lines, pa.large_binary())})
    return XC_RAW.parse(raw, first, Part("labels", "f", {"json": "f"}), "title")


@settings(deadline=None)
@given(st.lists(POINT, max_size=8), st.integers(0, 1 << 40))
def test_every_valid_point_comes_out(points: list[dict[str, Any]], first: int) -> None:
    parsed = parse_points([json.dumps(p).encode() for p in points], first)
    assert parsed.rejects == []
    rows = parsed.batch.to_pylist()
    assert [row["row"] for row in rows] == list(range(first, first + len(points)))
    for row, point in zip(rows, points, strict=True):
        assert row["key"] == point.get("uid", f"#{row['row']}")
        content = point.get("content", "")
        assert row["text"] == "\n".join(filter(None, (point["title"], content)))
        assert row["label_ids"] == sorted(set(point["target_ind"]))
        assert row["merged"] == len(point["target_ind"]) - len(set(point["target_ind"]))


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40) | NEAR.map(lambda value: json.dumps(value).encode()), max_size=8))
def test_hostile_lines_are_rows_or_rejects_never_exceptions(lines: list[bytes]) -> None:
    points = parse_points(lines, 5)
    kept = points.batch["row"].to_pylist()
    assert sorted([*kept, *(reject.line - 1 for reject in points.rejects)]) == list(range(5, 5 + len(lines)))
    assert all(ids and min(ids) >= 0 for ids in points.batch["label_ids"].to_pylist())
    labels = parse_labels(lines, 5)
    kept = labels.batch["row"].to_pylist()
    assert sorted([*kept, *(reject.line - 1 for reject in labels.rejects)]) == list(range(5, 5 + len(lines)))
    assert all(len(str(reject)) < 400 and str(reject).isprintable() for reject in [*points.rejects, *labels.rejects])


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b"{oops", Reason.NOT_JSON, "not JSON (Expecting property name"),
        (b"", Reason.NOT_JSON, "not JSON"),
        (b'{"title": "\xff"}', Reason.NOT_UNICODE, "not UTF-8 text: "),
        (b"[" * 100_000, Reason.NOT_JSON, "not JSON"),
        (b"1" * 10_000, Reason.NOT_JSON, "not JSON"),
        (b"[1]", Reason.NOT_OBJECT, "expected a JSON object, got [1]"),
        (b'{"target_ind": [1]}', Reason.MISSING_FIELD, "the field 'title' is missing; found ['target_ind']"),
        (b'{"title": "a"}', Reason.MISSING_FIELD, "the field 'target_ind' is missing; found ['title']"),
        (b'{"title": 3, "target_ind": [1]}', Reason.WRONG_TYPE, "title must be a string, got 3"),
        (b'{"title": "a", "content": [], "target_ind": [1]}', Reason.WRONG_TYPE, "content must be a string, got []"),
        (b'{"title": "a", "uid": true, "target_ind": [1]}', Reason.WRONG_TYPE, "uid must be a string, got True"),
        (b'{"title": "a", "target_ind": 1}', Reason.WRONG_TYPE, "target_ind must be a list of whole numbers, got 1"),
        (b'{"title": "a", "target_ind": [true]}', Reason.WRONG_TYPE, "whole numbers, got [True]"),
        (b'{"title": "a", "target_ind": [1.0]}', Reason.WRONG_TYPE, "whole numbers, got [1.0]"),
        (b'{"title": "\\ud800", "target_ind": [1]}', Reason.NOT_UNICODE, "half a surrogate pair at character 0"),
        (b'{"title": "a", "target_ind": [-1, 3]}', Reason.LABEL_OUT_OF_RANGE, "unknown label -1"),
        (b'{"title": "a", "target_ind": [9223372036854775808]}', Reason.LABEL_OUT_OF_RANGE, "unknown label 92"),
        (b'{"title": "a", "target_ind": []}', Reason.NO_LABELS, "has no labels (target_ind is empty)"),
    ],
)  # fmt: skip
def test_reasons(line: bytes, reason: Reason, detail: str) -> None:
    (reject,) = parse_points([line], 41, "trn.json.gz").rejects
    assert (reject.file, reject.line, reject.reason) == ("trn.json.gz", 42, reason)
    assert detail in reject.detail


def test_legal_corners() -> None:
    lines = [
        b'{"title": "", "target_ind": [9, 0, 9]}\r',
        b'{"uid": 7, "title": "a\\u0000b", "content": null, "target_ind": [1]}',
    ]
    parsed = parse_points(lines, 0)
    assert parsed.rejects == []
    assert parsed.batch["key"].to_pylist() == ["#0", "7"]
    assert parsed.batch["text"].to_pylist() == ["", "a\0b"]
    assert parsed.batch["label_ids"].to_pylist() == [[0, 9], [1]]


def test_title_alone_ignores_the_content() -> None:
    parsed = parse_points([b'{"title": "a", "content": "b", "target_ind": [1]}'], 0, text="title")
    assert parsed.batch["text"].to_pylist() == ["a"]
