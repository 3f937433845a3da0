import bz2
import contextlib
import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats import choose
from pipelines.formats.base import Fields, Reason, parse_fields
from pipelines.formats.keyed import JSON_LINES, Beir
from pipelines.options import FORMATS
from schemas import storage
from schemas.errors import InputError
from tests.command import call
from tests.pipelines.formats.forms import read_all, write

POINTS = [
    {"key": "q1", "text": "first point", "labels": ["b", "a", "b"]},
    {"key": 7, "title": "T", "text": "body", "labels": ["a"]},
    {"key": "q3", "title": "only", "labels": [12, "a"], "extra": {"x": 1}},
]
LABELS = [{"key": "a", "text": "label a"}, {"key": "b", "title": "label", "content": "b"}, {"key": 12, "text": ""}]


def packed(records: list[Any]) -> str:
    return "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


FILES: dict[str, str | bytes] = {"train.jsonl": packed(POINTS), "labels.jsonl": packed(LABELS)}
ROWS = [
    {"row": 0, "key": "q1", "text": "first point", "label_keys": ["a", "b"], "merged": 1},
    {"row": 1, "key": "7", "text": "T\nbody", "label_keys": ["a"], "merged": 0},
    {"row": 2, "key": "q3", "text": "only", "label_keys": ["12", "a"], "merged": 0},
]


@pytest.mark.parametrize("block_rows", [1, 2, 100])
def test_golden(tmp_path: Path, block_rows: int) -> None:
    write(tmp_path, {**FILES, "test.jsonl": packed(POINTS[:1]), "val.jsonl": "\n \n" + packed(POINTS[1:2])})
    assert choose(str(tmp_path)).name == "jsonl"
    inputs, tables = read_all("jsonl", tmp_path, block_rows)
    assert (inputs.keyed, inputs.shared_points, inputs.splits) == (True, False, ("train", "val", "test"))
    assert tables["train"].rows == ROWS
    assert tables["test"].rows == ROWS[:1]
    assert tables["val"].rows == [{**ROWS[1], "row": 2}]
    assert tables["labels"].rows == [
        {"row": 0, "key": "a", "text": "label a"},
        {"row": 1, "key": "b", "text": "label\nb"},
        {"row": 2, "key": "12", "text": ""},
    ]
    assert not any(table.rejects for table in tables.values())
    titles = read_all("jsonl", tmp_path, block_rows, text="title")[1]["train"]
    assert titles.column("text") == ["first point", "T", "only"]


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: bytes(pa.compress(data, "zstd")),
}


@pytest.mark.parametrize("names", [("train-0.jsonl", "train-1.jsonl"), ("train/a.ndjson", "train/b.ndjson")])
@pytest.mark.parametrize("codec", CODECS)
def test_many_files_in_many_dresses(tmp_path: Path, names: tuple[str, str], codec: str) -> None:
    halves = [packed(POINTS[:1]), packed(POINTS[1:])]
    for name, half in zip(names, halves, strict=True):
        other = b"\xef\xbb\xbf" + half.replace("\n", "\r\n").encode()
        write(tmp_path, {name + codec: CODECS[codec](other)})
    write(tmp_path, {"labels/part-00000.jsonl": packed(LABELS), "train/_SUCCESS": ""})
    inputs, tables = read_all("jsonl", tmp_path)
    assert [part.name for part in inputs.parts_of("train")] == [name + codec for name in names]
    assert [{**row, "row": 0} for row in tables["train"].rows] == [{**row, "row": 0} for row in ROWS]


def test_a_pattern_chooses_files() -> None:
    root = "memory://jsonl/pattern"
    for name in ("train-a.jsonl", "train-b.jsonl", "labels-a.jsonl", "labels-b.jsonl", "deep/x/train-a.jsonl"):
        storage.write_bytes(f"{root}/{name}", packed(LABELS if "labels" in name else POINTS).encode())
    inputs, _ = read_all("jsonl", f"{root}/*-a.jsonl")
    assert [part.name for part in inputs.parts] == ["train-a.jsonl", "labels-a.jsonl"]
    assert choose(f"{root}/*-a.jsonl").name == "jsonl"
    with pytest.raises(InputError, match="no known input format here; found: nothing"):
        choose(f"{root}/*-c.jsonl")


def test_texts_without_labels_are_answered_with_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a text")
    for source in (tmp_path, tmp_path / "one.txt"):
        with pytest.raises(InputError, match=r"write each text with its label .* Expected one of"):
            choose(str(source))


def test_features_beside_text_or_instead_of_it(tmp_path: Path) -> None:
    points: list[Any] = [
        {"key": "a", "labels": ["x"], "feature_ids": [5, 2, 5], "feature_values": [1, 2.5, 0.5]},
        {"key": "b", "labels": ["x"], "feature_ids": [3], "text": "t"},
        {"key": "c", "labels": ["x"], "text": "u"},
        {"key": "d", "labels": ["x"], "feature_ids": [1], "feature_values": [1, 2]},
        {"key": "e", "labels": ["x"], "feature_ids": [-1]},
        {"key": "f", "labels": ["x"], "feature_ids": [1 << 31]},
        {"key": "g", "labels": ["x"], "feature_ids": [1], "feature_values": [1e39]},
        {"key": "h", "labels": ["x"], "feature_ids": [1], "feature_values": ["1"]},
    ]
    _, tables = read_all("jsonl", write(tmp_path, {"train.jsonl": packed(points), "labels.jsonl": packed(LABELS)}))
    train = tables["train"]
    assert train.column("feature_ids") == [[2, 5], [3], []]
    assert train.column("feature_values") == [[2.5, 1.5], [1.0], []]
    assert train.column("text") == ["", "t", "u"]
    reasons = [reject.reason for reject in train.rejects]
    assert reasons == [Reason.MALFORMED, *[Reason.FEATURE_OUT_OF_RANGE] * 2, Reason.MALFORMED, Reason.WRONG_TYPE]
    assert "feature_ids" not in tables["labels"].rows[0]


def test_pairs_beside_the_points_of_every_split(tmp_path: Path) -> None:
    points = [{"key": f"q{i}", "text": "t"} for i in range(3)]
    pairs = [
        {"query_key": "q0", "label_key": "a"},
        {"query_key": "q1", "label_key": 12, "weight": 0.5},
        {"query_key": "q1", "label_key": "b", "weight": 0},
        {"query_key": "q1", "label_key": "b", "weight": "much"},
        {"query_key": "", "label_key": "b"},
        {"query_key": "q2"},
    ]
    files: dict[str, str | bytes] = {"labels.jsonl": packed(LABELS), "pairs_train.jsonl": packed(pairs)}
    files["pairs_test.tsv"] = "query_key\tlabel_key\nq2\ta\n"
    for shared in (False, True):
        own = (
            {"queries.jsonl": packed(points)}
            if shared
            else dict.fromkeys(("train.jsonl", "test.jsonl"), packed(points))
        )
        folder = write(tmp_path / str(shared), {**files, **own})
        inputs, tables = read_all("jsonl", folder)
        assert choose(str(folder)).name == "jsonl"
        assert inputs.shared_points == shared
        assert tables["train"].rows == [{"row": i, "key": f"q{i}", "text": "t", "merged": 0} for i in range(3)]
        assert tables["test"].rows == tables["train"].rows
        assert [(row["query_key"], row["label_key"]) for row in tables["pairs/train"].rows] == [
            ("q0", "a"),
            ("q1", "12"),
        ]
        reasons = [(reject.line, reject.reason) for reject in tables["pairs/train"].rejects]
        assert reasons == [(4, Reason.WRONG_TYPE), (5, Reason.MALFORMED), (6, Reason.MISSING_FIELD)]
        assert tables["pairs/test"].rows == [{"row": 1, "query_key": "q2", "label_key": "a"}]


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        ("{oops", Reason.NOT_JSON, "not JSON (Expecting property name"),
        ("[1]", Reason.NOT_OBJECT, "expected a JSON object, got [1]"),
        (
            '{"text": "a", "labels": ["a"]}',
            Reason.MISSING_FIELD,
            "the field 'key' is missing; found ['labels', 'text']",
        ),
        ('{"key": "", "text": "a", "labels": ["a"]}', Reason.MALFORMED, "key contains an empty key"),
        (
            '{"key": null, "text": "a", "labels": ["a"]}',
            Reason.WRONG_TYPE,
            "key must be a string, got None",
        ),
        (
            '{"key": 1.5, "text": "a", "labels": ["a"]}',
            Reason.WRONG_TYPE,
            "up to 64 bits, got 1.5",
        ),
        ('{"key": "a", "labels": ["a"]}', Reason.MISSING_FIELD, "the field 'text' is missing"),
        ('{"key": "a", "text": 3, "labels": ["a"]}', Reason.WRONG_TYPE, "text must be a string, got 3"),
        ('{"key": "a", "text": "\\ud800", "labels": ["a"]}', Reason.NOT_UNICODE, "half a surrogate pair"),
        ('{"key": "a", "text": "b"}', Reason.NO_LABELS, "has no labels (labels is empty or missing)"),
        ('{"key": "a", "text": "b", "labels": 5}', Reason.WRONG_TYPE, "labels must be a list of label keys, got 5"),
        ('{"key": "a", "text": "b", "labels": "[1 2]"}', Reason.MALFORMED, "'1 2' without quotes may mean"),
        ('{"key": "a", "text": "b", "labels": []}', Reason.NO_LABELS, "the point 'a' has no labels (labels is empty"),
        ('{"key": "a", "text": "b", "labels": [null]}', Reason.NO_LABELS, "the point 'a' has no labels"),
        ('{"key": "a", "text": "b", "labels": [true]}', Reason.WRONG_TYPE, "labels must be a string, got True"),
        ('{"key": "a", "text": "b", "labels": [""]}', Reason.MALFORMED, "labels contains an empty key"),
    ],
)
def test_one_bad_row_is_rejected_and_named(tmp_path: Path, line: str, reason: Reason, detail: str) -> None:
    write(tmp_path, {**FILES, "train.jsonl": packed([POINTS[0], line, POINTS[2]])})
    train = read_all("jsonl", tmp_path)[1]["train"]
    assert train.rows == [ROWS[0], ROWS[2]]
    (reject,) = train.rejects
    assert (reject.file, reject.line, reject.reason) == ("train.jsonl", 2, reason)
    assert detail in reject.detail


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train.jsonl": None},
            r"no train here; found: labels.jsonl. Expected train.jsonl \(key, text, labels\)",
        ),
        ({"labels.jsonl": None}, "no labels here; found: train.jsonl"),
        ({"train.jsonl.gz": b""}, "both train.jsonl and train.jsonl.gz are here, with the same content"),
        ({"train.jsonl": ""}, "train.jsonl: the file is empty"),
        ({"train.jsonl": None, "train.jsonl.gz": b"plain"}, "train.jsonl.gz: not a gzip file"),
        ({"train.jsonl": None, "train.jsonl.gz": gzip.compress(b"x" * 99)[:-9]}, "train.jsonl.gz: incomplete"),
        ({"train.jsonl": b"\xff\xfe{"}, "train.jsonl: not text in utf-16, within the first 3 bytes .*truncated"),
        ({"pairs_val.tsv": "a\tb\n"}, "no points for pairs_val.tsv"),
        (
            {"pairs_train.tsv": "a\tb\n", "queries.jsonl": "{}\n"},
            "both train.jsonl and queries.jsonl contain points of train",
        ),
    ],
)
def test_one_clear_error(tmp_path: Path, changes: dict[str, str | bytes | None], message: str) -> None:
    files = {name: content for name, content in {**FILES, **changes}.items() if content is not None}
    with pytest.raises(InputError, match=message) as caught:
        read_all("jsonl", write(tmp_path, files))
    assert "\n" not in str(caught.value)


def test_fields_of_other_names(tmp_path: Path) -> None:
    records = [{"id": "q", "query": "t", "positives": ["a"]}]
    files = {"train.jsonl": packed(records), "labels.jsonl": packed([{"id": "a", "query": "l"}])}
    form = replace(JSON_LINES, fields=parse_fields("key=id, text=query,labels=positives"))
    _, tables = read_all(form, write(tmp_path, files))
    assert tables["train"].rows == [{"row": 0, "key": "q", "text": "t", "label_keys": ["a"], "merged": 0}]
    assert tables["labels"].rows == [{"row": 0, "key": "a", "text": "l"}]
    assert parse_fields("") == Fields()
    of_pairs = parse_fields("key=query_key,weight=score")  # a table of its own
    assert of_pairs == Fields(key="query_key", weight="score")


def test_the_command_line_names_every_form() -> None:
    names = ",".join(FORMATS)
    assert f"FormatofINPUT:{names}.Default:" in "".join(call("shard", "--help").out.split())


def test_fields_are_for_the_forms_with_string_keys(tmp_path: Path) -> None:
    form = choose(str(write(tmp_path / "a", FILES)), None, "key=id")
    assert form == replace(JSON_LINES, fields=Fields(key="id"))
    assert choose("anywhere", "beir", "text=query") == Beir(fields=Fields(key="_id", text="query"))
    with pytest.raises(
        InputError, match=r"^fields works only with formats that have named fields; .* is read as xc-text"
    ):
        choose(str(write(tmp_path / "b", {"trn_X.txt": ""})), None, "key=id")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys=id", "unknown field 'keys'; did you mean key"),
        ("zzz=id", "unknown field 'zzz'; known fields: key, text"),
        ("key", "expected key=NAME once, as in key=id,text=query, got 'key'"),
        ("key=", "expected key=NAME once, as in key=id,text=query, got 'key='"),
        ("key=a,key=b", "expected key=NAME once, as in key=id,text=query, got 'key=b'"),
        ("text=a,title=a", "text and title both name the column 'a'. Use it once"),
        ("label=a,labels=a", "label and labels both name the column 'a'"),
    ],
)
def test_fields_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_fields(text)


NEAR = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("key", "text", "title", "labels", "feature_ids", "feature_values", "query_key", "label_key", "weight"),
        st.text("ab\ud800é", max_size=3)
        | st.lists(st.integers(-2, 3) | st.text("ab", max_size=2) | st.none(), max_size=3)
        | st.sampled_from([None, True, 7, -1.5, {}, [[1]], 1e400, [1e400]]),
    ),
)
HOSTILE = st.binary(max_size=30) | NEAR.map(lambda value: json.dumps(value).encode())


@settings(deadline=None, max_examples=150)
@given(st.lists(st.lists(HOSTILE, max_size=4), min_size=3, max_size=3), st.integers(1, 4))
def test_hostile_bytes_are_an_input_error_or_rejects(contents: list[list[bytes]], block: int) -> None:
    root = "memory://jsonl/hostile"
    for name, lines in zip(("train.jsonl", "labels.jsonl", "pairs_train.jsonl"), contents, strict=True):
        storage.write_bytes(f"{root}/{name}", b"\n".join([*lines, b""]))
    with contextlib.suppress(InputError):
        read_all("jsonl", root, block)
    storage.remove(f"{root}/pairs_train.jsonl")
    with contextlib.suppress(InputError):
        read_all("jsonl", root, block)


BROKEN = {
    "not a number": '{"key": "q0", "text": "t", "labels": ["a"], "feature_ids": [1], "feature_values": [NaN]}',
    "cut off": '{"key": "q0", "text": "t", "labels": ["a"], "feature_ids": [1',
    "no object": "[1, 2]",
    "no JSON": "\\x00\\x01",
    "without features": '{"key": "q0", "text": "t", "labels": ["a"]}',
}


@pytest.mark.parametrize("first", BROKEN)
@pytest.mark.parametrize("filler", [0, 1 << 21])
def test_a_broken_first_record_drops_no_features(tmp_path: Path, first: str, filler: int) -> None:
    good = {"key": "q1", "text": "t", "labels": ["a"], "feature_ids": [3], "feature_values": [0.5]}
    write(tmp_path, {"train.jsonl": BROKEN[first] + "\n" + " " * filler * (first != "without features") + "\n"})
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(packed([good]))
    write(tmp_path, {"labels.jsonl": packed([{"key": "a", "text": "label"}])})
    rows = read_all("jsonl", tmp_path, 100)[1]["train"].rows
    assert (rows[-1]["key"], rows[-1]["feature_ids"], rows[-1]["feature_values"]) == ("q1", [3], [0.5])
