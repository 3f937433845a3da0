import contextlib
import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats import choose
from pipelines.formats.base import Reason
from schemas import storage
from schemas.errors import InputError
from tests.pipelines.formats.forms import read_all, write

# The second point has no labels, the third no features; the header declares a label and features beyond.
TRAIN = "4 10 5\n3,0,3 7:0.5 1:2\n 1:1 2:1\n2\n1 0:1e-2 0:1\n"
FILES: dict[str, str | bytes] = {"train.txt": TRAIN, "test.txt": "1 10 5\n0 9:1.0\n"}


@pytest.mark.parametrize("block_rows", [1, 3, 100])
@pytest.mark.parametrize("dress", ["{}", "eurlex_{}", "{}.gz"])
def test_golden(tmp_path: Path, block_rows: int, dress: str) -> None:
    for name, content in FILES.items():
        assert isinstance(content, str)
        other = b"\xef\xbb\xbf" + content.replace("\n", "\r\n").encode()
        write(tmp_path, {dress.format(name): gzip.compress(other) if dress.endswith(".gz") else content})
    inputs, tables = read_all("xc-single", tmp_path, block_rows)
    assert (inputs.format, inputs.keyed, inputs.labels, inputs.features) == ("xc-single", False, 5, 10)
    assert tables["train"].rows == [
        {"row": 0, "key": "#0", "text": "", "label_ids": [0, 3], "feature_ids": [1, 7], "feature_values": [2.0, 0.5],
         "merged": 1},
        {"row": 2, "key": "#2", "text": "", "label_ids": [2], "feature_ids": [], "feature_values": [], "merged": 0},
        {"row": 3, "key": "#3", "text": "", "label_ids": [1], "feature_ids": [0],
         "feature_values": [pytest.approx(1.01)], "merged": 0},
    ]  # fmt: skip
    (reject,) = tables["train"].rejects
    assert (reject.file, reject.line, reject.reason) == (dress.format("train.txt"), 3, Reason.NO_LABELS)
    assert tables["test"].column("feature_ids") == [[9]]
    assert tables["labels"].rows == [{"row": row, "key": f"#{row}", "text": ""} for row in range(5)]


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        ("3:1 4:1", Reason.MALFORMED, "expected labels such as 3,17,20, got '3:1'"),
        ("1,2, 4:1", Reason.MALFORMED, "expected labels such as 3,17,20, got ''"),
        ("1, 2 4:1", Reason.MALFORMED, "expected fields index:value such as 12:1.0, got '2'"),
        ("1,x 4:1", Reason.MALFORMED, "expected labels such as 3,17,20, got 'x'"),
        ("1\t4:1", Reason.MALFORMED, r"expected labels such as 3,17,20, got '1\t4:1'"),
        ("1,2 4", Reason.MALFORMED, "expected fields index:value such as 12:1.0, got '4'"),
        ("1 4:one", Reason.MALFORMED, "got '4:one'"),
        ("1 4:1e99", Reason.MALFORMED, "a value does not fit into a 32-bit float"),
        (" 4:1", Reason.NO_LABELS, "the point has no labels"),
        ("", Reason.NO_LABELS, "the point has no labels"),
    ],
)
def test_one_bad_row_is_rejected_and_named(tmp_path: Path, line: str, reason: Reason, detail: str) -> None:
    write(tmp_path, {"train.txt": f"3 10 5\n1 1:1\n{line}\n2 2:1\n"})
    _, tables = read_all("xc-single", tmp_path)
    assert tables["train"].column("label_ids") == [[1], [2]]
    (reject,) = tables["train"].rejects
    assert (reject.file, reject.line, reject.reason) == ("train.txt", 3, reason)
    assert detail in reject.detail


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "train.txt: the file is empty"),
        (
            "0,1 2:1\n3 4:1\n",
            "line 1: expected the header `points features labels`, three whole numbers; got '0,1 2:1'",
        ),
        ("4 10\n", "line 1: expected the header `points features labels`.*got '4 10'"),
        ("1 10 5\n5 1:1\n", "train.txt, line 2: index 5 is too large: the header declares 5 labels"),
        ("1 10 5\n1 10:1\n", "train.txt, line 2: index 10 is too large: the header declares 10 features"),
        ("1 10 5\n1 1:1\n1 1:1\n", "train.txt, line 3: the header declares 1 rows"),
        ("3 10 5\n1 1:1\n1 1:", "train.txt: incomplete: 2 lines after the header, expected 3"),
        ("999999999999 10 5\n1 1:1\n", "train.txt: incomplete: 1 lines after the header, expected 999,999,999,999"),
        ("1 10 99999999999\n1 1:1\n", "the header declares 99,999,999,999 labels for 1 points"),
        ("1 99999999999 5\n1 1:1\n", "the header declares 99,999,999,999 features"),
    ],
)
def test_one_clear_error(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_all("xc-single", write(tmp_path, {"train.txt": content}))
    assert "\n" not in str(caught.value)


POINT = st.tuples(
    st.lists(st.integers(0, 6), max_size=4),
    st.dictionaries(st.integers(0, 20), st.floats(-9, 9, width=16), max_size=5),
)


@settings(deadline=None)
@given(st.lists(POINT, min_size=1, max_size=9), st.integers(1, 5))
def test_round_trip(points: list[tuple[list[int], dict[int, float]]], block: int) -> None:
    lines = [f"{len(points)} 21 7"]
    for labels, features in points:
        lines.append(",".join(map(str, labels)) + "".join(f" {i}:{v}" for i, v in features.items()))
        if not labels and not features:
            lines[-1] = " "
    storage.write_bytes("memory://single/round/train.txt", "\n".join([*lines, ""]).encode())
    train = read_all("xc-single", "memory://single/round", block)[1]["train"]
    kept = [(row, labels, features) for row, (labels, features) in enumerate(points) if labels]
    assert train.column("row") == [row for row, _, _ in kept]
    assert train.column("label_ids") == [sorted(set(labels)) for _, labels, _ in kept]
    assert train.column("merged") == [len(labels) - len(set(labels)) for _, labels, _ in kept]
    pairs = [dict(zip(row["feature_ids"], row["feature_values"], strict=True)) for row in train.rows]
    assert pairs == [features for _, _, features in kept]


HOSTILE = st.binary(max_size=40) | st.text("0123456789:., \n-e", max_size=40).map(str.encode)


@settings(deadline=None, max_examples=150)
@given(HOSTILE, st.sampled_from([b"", b"3 10 5\n", b"3 10 5\n1,2 3:4\n"]), st.integers(1, 4))
def test_hostile_bytes_are_an_input_error_or_rejects(content: bytes, head: bytes, block: int) -> None:
    storage.write_bytes("memory://single/hostile/train.txt", head + content)
    with contextlib.suppress(InputError):
        read_all("xc-single", "memory://single/hostile", block)


def test_the_form_is_found_by_its_names(tmp_path: Path) -> None:
    write(tmp_path, {**FILES, "filter_labels_train.txt": "", "filter_labels_test.txt": ""})
    assert choose(str(tmp_path)).name == "xc-single"
    inputs, _ = read_all("xc-single", tmp_path)
    assert sorted(inputs.filters) == ["test", "train"]
    write(tmp_path, {"eurlex_train.txt": TRAIN})
    with pytest.raises(InputError, match=r"both eurlex_train.txt and train.txt are here"):
        read_all("xc-single", tmp_path)
