import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats import choose
from pipelines.formats.base import Reason, parse_fields
from pipelines.formats.keyed import PARQUET_FILES
from schemas import storage
from schemas.errors import InputError
from tests.pipelines.formats.forms import read_all, write


def packed(columns: dict[str, Any] | pa.Table, row_group_size: int = 2) -> bytes:
    out = io.BytesIO()
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, out, row_group_size=row_group_size)
    return out.getvalue()


TRAIN: dict[str, Any] = {
    "key": ["q1", "q2", "q3"],
    "text": ["first", "", "é"],
    "labels": [["b", "a", "b"], ["a"], ["é", "z"]],
}
LABELS: dict[str, Any] = {"key": ["a", "b", "é", "z"], "text": list("ABCD")}
ROWS = [
    {"row": 0, "key": "q1", "text": "first", "label_keys": ["a", "b"], "merged": 1},
    {"row": 1, "key": "q2", "text": "", "label_keys": ["a"], "merged": 0},
    {"row": 2, "key": "q3", "text": "é", "label_keys": ["z", "é"], "merged": 0},
]


@pytest.mark.parametrize("block_rows", [1, 2, 100])
@pytest.mark.parametrize(
    "names", [("train.parquet",), ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet")]
)
def test_golden(tmp_path: Path, block_rows: int, names: tuple[str, ...]) -> None:
    whole = pa.table({**TRAIN, "more": [1, 2, 3]})
    for number, name in enumerate(names):
        part = whole if len(names) == 1 else whole.slice(0, 2) if number == 0 else whole.slice(2)
        write(tmp_path, {name: packed(part)})
    write(tmp_path, {"labels/0.parquet": packed(LABELS)})
    assert choose(str(tmp_path)).name == "parquet"
    inputs, tables = read_all("parquet", tmp_path, block_rows)
    assert inputs.keyed
    assert [{**row, "row": 0} for row in tables["train"].rows] == [{**row, "row": 0} for row in ROWS]
    assert tables["labels"].column("key") == LABELS["key"]
    assert not any(table.rejects for table in tables.values())


@pytest.mark.parametrize(
    "dress",
    [
        {"key": pa.large_string(), "labels": pa.large_list(pa.large_string())},
        {"key": pa.dictionary(pa.int32(), pa.string()), "labels": pa.list_(pa.dictionary(pa.int8(), pa.string()))},
        {"key": pa.string_view(), "text": pa.string_view()},
    ],
)
def test_columns_of_other_types(tmp_path: Path, dress: dict[str, pa.DataType]) -> None:
    columns = {name: pa.array(values, dress.get(name)) for name, values in TRAIN.items()}
    write(tmp_path, {"train.parquet": packed(columns), "labels.parquet": packed(LABELS)})
    assert read_all("parquet", tmp_path)[1]["train"].rows == ROWS


def test_keys_and_labels_that_are_numbers(tmp_path: Path) -> None:
    columns = {
        "key": pa.array([5, 6], pa.uint32()),
        "title": ["a", None],
        "content": ["x", "y"],
        "labels": [[12, 3], [3]],
    }
    write(tmp_path, {"train.parquet": packed(columns), "labels.jsonl": '{"key": 3, "text": ""}\n'})
    train = read_all("parquet", tmp_path)[1]["train"]
    assert train.column("key") == ["5", "6"]
    assert train.column("label_keys") == [["12", "3"], ["3"]]
    assert train.column("text") == ["a\nx", "y"]
    assert read_all("parquet", tmp_path, text="title")[1]["train"].column("text") == ["a", "y"]


def test_nulls_and_empty_keys_are_rejected(tmp_path: Path) -> None:
    columns = {
        "key": ["a", None, "", "d", "e", "f", "g"],
        "text": ["t", "t", "t", None, "t", "t", "t"],
        "labels": [["x"], ["x"], ["x"], ["x"], None, [], ["x", None]],
    }
    write(tmp_path, {"train.parquet": packed(columns), "labels.parquet": packed(LABELS)})
    train = read_all("parquet", tmp_path)[1]["train"]
    assert [(row["key"], row["label_keys"]) for row in train.rows] == [("a", ["x"]), ("g", ["x"])]
    assert [(reject.line, reject.reason) for reject in train.rejects] == [
        (2, Reason.MISSING_FIELD),
        (3, Reason.MALFORMED),
        (4, Reason.MISSING_FIELD),
        (5, Reason.NO_LABELS),
        (6, Reason.NO_LABELS),
    ]


def test_strings_that_are_not_utf8_are_rejected(tmp_path: Path) -> None:
    bad = pa.array([b"good", b"\xff", b"fine"]).view(pa.string())
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 2, 3], pa.int32()), pa.array([b"a", b"a", b"\xfe"]).view(pa.string())
    )
    columns = {"key": ["a", "b", "c"], "text": bad, "labels": lists}
    write(tmp_path, {"train.parquet": packed(columns), "labels.parquet": packed(LABELS)})
    train = read_all("parquet", tmp_path)[1]["train"]
    assert train.column("key") == ["a"]
    assert [(reject.line, reject.reason) for reject in train.rejects] == [
        (2, Reason.NOT_UNICODE),
        (3, Reason.NOT_UNICODE),
    ]


def test_features(tmp_path: Path) -> None:
    columns = {
        "key": list("abcdef"),
        "labels": [["x"]] * 6,
        "feature_ids": [[5, 2, 5], None, [1], [-1], [1 << 31], [7]],
        "feature_values": [[1, 2.5, 0.5], None, [1, 2], [1], [1], [1e39]],
    }
    write(tmp_path, {"train.parquet": packed(columns), "labels.parquet": packed(LABELS)})
    train = read_all("parquet", tmp_path)[1]["train"]
    assert train.column("feature_ids") == [[2, 5], []]
    assert train.column("feature_values") == [[2.5, 1.5], []]
    out = Reason.FEATURE_OUT_OF_RANGE
    assert [reject.reason for reject in train.rejects] == [Reason.MALFORMED, out, out, Reason.MALFORMED]


def test_pairs(tmp_path: Path) -> None:
    pairs = {"query_key": ["q", "q", "q", None], "label_key": ["a", "b", "z", "a"], "weight": [1.0, 0.0, None, 1.0]}
    points = {"key": ["q"], "text": ["t"]}
    files = {"pairs_train.parquet": packed(pairs), "labels.parquet": packed(LABELS), "queries.parquet": packed(points)}
    inputs, tables = read_all("parquet", write(tmp_path, dict(files)))
    assert inputs.shared_points
    assert tables["pairs/train"].rows == [{"row": 0, "query_key": "q", "label_key": "a"}]
    reasons = [(reject.line, reject.reason) for reject in tables["pairs/train"].rejects]
    assert reasons == [(3, Reason.WRONG_TYPE), (4, Reason.MISSING_FIELD)]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (b"", "train.parquet: not a Parquet file, or damaged"),
        (b"PAR1 no PAR1", "train.parquet: not a Parquet file, or damaged"),
        (packed(TRAIN)[:-20], "train.parquet: not a Parquet file, or damaged"),
        (
            packed({"id": ["a"], "text": ["t"]}),
            "no column 'key'; found: 'id', 'text'. If the column has another name.* fields",
        ),
        (packed({"key": ["a"], "labels": [["a"]]}), "no column 'title' or 'text' or 'content'; found: 'key', 'labels'"),
        (packed({**TRAIN, "key": [1.5, 2.5, 3.5]}), "the column 'key' is of type double; expected a string or a whole"),
        (packed({**TRAIN, "text": [1, 2, 3]}), "the column 'text' is of type int64; expected a string"),
        (
            packed({**TRAIN, "labels": [1.5, 2.5, 3.5]}),
            "the column 'labels' is of type double; expected a list of label",
        ),
        (
            packed({**TRAIN, "labels": [[1.5]] * 3}),
            "the column 'labels' is of type double; expected a string or a whole",
        ),
        (
            packed({**TRAIN, "feature_ids": [["a"]] * 3}),
            "the column 'feature_ids' contains string; expected whole numbers",
        ),
        (
            packed({**TRAIN, "feature_ids": [1] * 3}),
            "the column 'feature_ids' is of type int64; expected a list of whole",
        ),
    ],
)
def test_one_clear_error(tmp_path: Path, train: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_all("parquet", write(tmp_path, {"train.parquet": train, "labels.parquet": packed(LABELS)}))
    assert "\n" not in str(caught.value)


def test_fields_of_other_names(tmp_path: Path) -> None:
    write(tmp_path, {"train.parquet": packed({"id": ["q"], "t": ["x"], "y": [["a"]]})})
    write(tmp_path, {"labels.parquet": packed({"id": ["a"], "t": ["x"]})})
    form = replace(PARQUET_FILES, fields=parse_fields("key=id,text=t,labels=y"))
    assert read_all(form, tmp_path)[1]["train"].column("label_keys") == [["a"]]


WORD = st.text("abé ", max_size=3)
RECORD = st.fixed_dictionaries(
    {
        "key": st.none() | WORD,
        "title": st.none() | WORD,
        "text": st.none() | WORD,
        "content": st.none() | WORD,
        "labels": st.lists(WORD, max_size=4),
        "feature_ids": st.lists(st.integers(-1, 4), max_size=3),
        "feature_values": st.lists(st.floats(-4, 4, width=16), max_size=3),
    }
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(RECORD, min_size=1, max_size=8),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(["title+content", "title"]),
)
def test_parquet_and_json_lines_of_one_data_set_are_one(
    records: list[dict[str, Any]], block: int, features: bool, text: str
) -> None:
    names = ["key", "title", "text", "content", "labels"] + ["feature_ids", "feature_values"] * features
    kinds = [*[pa.string()] * 4, pa.list_(pa.string()), pa.list_(pa.int64()), pa.list_(pa.float64())]
    schema = pa.schema(list(zip(names, kinds, strict=False)))
    some = [{name: record[name] for name in names} for record in records]
    root = "memory://columnar/same"
    storage.write_bytes(f"{root}/train.parquet", packed(pa.Table.from_pylist(some, schema)))
    storage.write_bytes(f"{root}/train.jsonl", b"".join(json.dumps(record).encode() + b"\n" for record in some))
    storage.write_bytes(f"{root}/labels.jsonl", b'{"key": "a", "text": "b"}\n')
    columns = read_all("parquet", root, block, text)[1]["train"]
    lines = read_all("jsonl", root, block, text)[1]["train"]
    assert columns.rows == lines.rows
    assert [reject.line for reject in columns.rejects] == [reject.line for reject in lines.rejects]


WHOLE = packed({**TRAIN, "feature_ids": [[1], [2, 3], []]})


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_damage_is_an_input_error_or_harmless(data: st.DataObject) -> None:
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    root = "memory://columnar/damaged"
    storage.write_bytes(f"{root}/train.parquet", bytes(content))
    storage.write_bytes(f"{root}/labels.jsonl", b'{"key": "a", "text": "b"}\n')
    with contextlib.suppress(InputError):
        read_all("parquet", root, 2)
