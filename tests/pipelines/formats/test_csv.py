"""CSV, TSV and saved `datasets`: pairs alone, labels that nobody lists, names of columns, rejects with their lines."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import formats
from pipelines.formats.base import LABELS, Reason, text_key
from schemas.errors import InputError
from tests.pipelines.formats.forms import read_all

PAIRS = 'text,label\n"a ship, in\na storm",sea\na ship at anchor,ships\n"a ship, in\na storm",ships\n'
SEA, ANCHOR = "a ship, in\na storm", "a ship at anchor"


def points(source: Path, **options: Any) -> dict[str, Any]:
    form = formats.choose(str(source), **options)
    inputs, tables = read_all(form, source)
    assert inputs.keyed
    return {"format": inputs.format, **tables}


def test_pairs_alone_give_points_and_labels(tmp_path: Path) -> None:
    source = tmp_path / "pairs.csv"
    source.write_text(PAIRS)
    tables = points(source)
    assert tables["format"] == "csv"
    rows = tables["train"].rows
    assert [(row["text"], row["label_keys"]) for row in rows] == [(SEA, ["sea"]), (ANCHOR, ["ships"]), (SEA, ["ships"])]
    assert [row["key"] for row in rows] == [text_key(SEA), text_key(ANCHOR), text_key(SEA)]
    assert {(row["key"], row["text"]) for row in tables[LABELS].rows} == {("sea", "sea"), ("ships", "ships")}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.csv", "key;text;labels\nq1;one;a|b\nq2;two;\n"),
        ("train.csv.gz", 'key,text,labels\nq1,one,"[""a"", ""b""]"\nq2,two,[]\n'),
        ("train.tsv", "key\ttext\tlabels\nq1\tone\ta;b\nq2\ttwo\t\n"),
        ("train.csv", "\ufeffkey,text,labels\r\nq1,one,\"['b', 'a']\"\r\n\r\nq2,two,\r\n"),
    ],
)
def test_lists_of_labels_in_any_dress(name: str, content: str, tmp_path: Path) -> None:
    body = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(body) if name.endswith(".gz") else body)
    tables = points(tmp_path)
    assert [(row["key"], row["text"], row["label_keys"]) for row in tables["train"].rows] == [("q1", "one", ["a", "b"])]
    (reject,) = tables["train"].rejects
    assert reject.reason == Reason.NO_LABELS
    assert not tables[LABELS].rejects
    assert sorted(row["key"] for row in tables[LABELS].rows) == ["a", "b"]


def test_rejects_name_the_line_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\none,a\ntwo\nthree,\nfour,b\nfive,c,d\n")
    tables = points(tmp_path)
    assert [row["text"] for row in tables["train"].rows] == ["one", "four"]
    assert [(reject.line, reject.reason) for reject in tables["train"].rejects] == [
        (3, Reason.MALFORMED),
        (4, Reason.NO_LABELS),
        (6, Reason.MALFORMED),
    ]


def test_queries_and_labels_have_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("id,query,codes\n7,one,x|y\n")
    (tmp_path / "labels.csv").write_text("code,name\nx,the x\ny,the y\n")
    names = "key=id,text=query,labels=codes,labels.key=code,labels.text=name"
    tables = points(tmp_path, fields=names)
    assert tables["train"].rows[0] | {"row": 0} == {
        "row": 0,
        "key": "7",
        "text": "one",
        "label_keys": ["x", "y"],
        "merged": 0,
    }
    assert [(row["key"], row["text"]) for row in tables[LABELS].rows] == [("x", "the x"), ("y", "the y")]
    with pytest.raises(
        InputError, match=r"labels.csv: no column 'key'; found: 'code', 'name'.* fields=\"labels.key=code"
    ):
        points(tmp_path, fields="key=id,text=query,labels=codes,labels.key=key,labels.text=text")


@pytest.mark.parametrize("points_kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("labels_kind", ["csv", "tsv", "jsonl", "parquet"])
def test_labels_are_read_from_a_file_of_any_kind(points_kind: str, labels_kind: str, tmp_path: Path) -> None:
    write_rows(tmp_path / f"train.{points_kind}", [{"key": "q", "text": "a ship", "labels": ["sea"]}])
    write_rows(tmp_path / f"labels.{labels_kind}", [{"key": "sea", "text": "the sea"}, {"key": "moon", "text": "moon"}])
    found = [(row["key"], row["text"]) for row in points(tmp_path)[LABELS].rows]
    assert found == [("sea", "the sea"), ("moon", "moon")]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("fields", ["text=qeury", "key=di", "labels=c", "label=c", "labels.text=nmae"])
def test_a_column_that_fields_name_exists(suffix: str, fields: str, tmp_path: Path) -> None:
    write_rows(tmp_path / f"train.{suffix}", [{"key": "q", "title": "a ship", "labels": ["sea"]}])
    write_rows(tmp_path / f"labels.{suffix}", [{"key": "sea", "title": "the sea"}])
    column = fields.partition("=")[2]
    with pytest.raises(InputError, match=f"no (column '{column}'|labels .*{column}).*; found: .*key"):
        points(tmp_path, fields=fields)


def test_pairs_of_a_csv_are_those_of_a_tsv(tmp_path: Path) -> None:
    for suffix in ("csv", "tsv"):
        folder = tmp_path / suffix
        folder.mkdir()
        write_rows(folder / "queries.csv", [{"key": "q", "text": "a ship"}])
        write_rows(folder / "labels.csv", [{"key": "sea", "text": "the sea"}])
        rows = [("q", "sea", "1"), ("q", "x", "0"), ("q", "y", "0.5"), ("", "sea", "1"), ("q", "sea", "much")]
        names = ("query_key", "label_key", "weight")
        write_rows(folder / f"pairs_train.{suffix}", [dict(zip(names, row, strict=True)) for row in rows])
    (csv_pairs, csv_rejects), (tsv_pairs, tsv_rejects) = (
        (tables["pairs/train"].rows, [(reject.line, reject.reason.value) for reject in tables["pairs/train"].rejects])
        for tables in (points(tmp_path / "csv"), points(tmp_path / "tsv"))
    )
    assert csv_pairs == tsv_pairs
    assert [line for line, _ in csv_rejects] == [line for line, _ in tsv_rejects] == [5, 6]


@pytest.mark.parametrize("source", ["train.csv", ""])
def test_fields_of_labels_need_a_file_of_labels(source: str, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(PAIRS)
    with pytest.raises(InputError, match=r"labels\.\* names columns .* leave labels\.\* out"):
        points(tmp_path / source, fields="labels.key=code")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write `rows` as the kind of file that `path` ends with."""
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        mark = "\t" if path.suffix == ".tsv" else ","
        cells = [["|".join(cell) if isinstance(cell, list) else cell for cell in row.values()] for row in rows]
        path.write_text("".join(mark.join(row) + "\n" for row in [[*rows[0]], *cells]))


COLUMNS = {"key": "k", "title": "a", "text": "b", "content": "c", "labels": "x"}


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("fields", "key", "text"),
    [
        (None, "k", "a\nb"),
        ("text=title", "k", "a"),
        ("text=content", "k", "a\nc"),
        ("title=text", "k", "b\nc"),
        ("title=content,text=title", "k", "c\na"),
        ("key=title", "a", "b"),
        ("key=text", "b", "a\nb"),
        ("key=text,text=text,title=key", "b", "k\nb"),
    ],
)
def test_a_column_is_used_once(suffix: str, fields: str | None, key: str, text: str, tmp_path: Path) -> None:
    """What --fields states takes a column from the field that is called so; a key alone may be the text as well."""
    source = tmp_path / f"mine.{suffix}"
    write_rows(source, [{**COLUMNS, "labels": ["x"]}])
    (point,) = points(source, fields=fields)["train"].rows
    assert (point["key"], point["text"], point["label_keys"]) == (key, text, ["x"])


def test_one_label_a_row_may_be_in_a_column_called_labels(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,labels\none,a;b\n")
    assert points(tmp_path)["train"].rows[0]["label_keys"] == ["a", "b"]
    assert points(tmp_path, fields="label=labels")["train"].rows[0]["label_keys"] == ["a;b"]


def test_a_tsv_has_quotes_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "mine.tsv").write_text('text\tlabel\na "quoted" ship\tsea\n')
    rows = points(tmp_path / "mine.tsv")["train"].rows
    assert [(row["text"], row["label_keys"]) for row in rows] == [('a "quoted" ship', ["sea"])]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_is_named_directly(suffix: str, tmp_path: Path) -> None:
    source = tmp_path / f"whatever.{suffix}"
    write_rows(source, [{"text": "one", "labels": ["a", "b"]}, {"text": "two", "labels": ["b"]}])
    tables = points(source)
    assert [row["label_keys"] for row in tables["train"].rows] == [["a", "b"], ["b"]]
    assert {row["key"] for row in tables[LABELS].rows} == {"a", "b"}


def test_a_saved_data_set_has_its_splits_and_the_names_of_its_classes(tmp_path: Path) -> None:
    features = {
        "text": {"dtype": "string", "_type": "Value"},
        "label": {"names": ["sea", "ships"], "_type": "ClassLabel"},
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    schema = pa.schema([("text", pa.string()), ("label", pa.int64())], metadata=metadata)
    for split, texts in (("train", ["one", "two", "three"]), ("test", ["four"])):
        (tmp_path / split).mkdir()
        table = pa.table({"text": texts, "label": [n % 2 for n in range(len(texts))]}, schema=schema)
        with pa.ipc.new_stream(str(tmp_path / split / "data-00000-of-00001.arrow"), schema) as writer:
            writer.write_table(table)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    tables = points(tmp_path)
    assert tables["format"] == "datasets"
    assert [row["label_keys"] for row in tables["train"].rows] == [["sea"], ["ships"], ["sea"]]
    assert [row["text"] for row in tables["test"].rows] == ["four"]
    assert tables["train"].rows == points(tmp_path / "train")["train"].rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "question,topic,id\nx,y,1\n",
            "no text .* and no labels .*found: question, topic, id.*text=question",
        ),
        ('text,label\n"open,a\n', "not CSV"),
        ("text,label,label\na,b,c\n", "two columns are called 'label'"),
        (b"text,label\n\xff\xfe,a\n", "not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_named(content: str | bytes, message: str, tmp_path: Path) -> None:
    source = tmp_path / "x.csv"
    source.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        points(source)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> pytest.TempPathFactory:
    return tmp_path_factory


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00\ufeff"), max_size=12)


@given(st.lists(st.tuples(TEXTS, st.text(st.characters(codec="ascii", categories=["L"]), min_size=1)), min_size=1))
def test_what_the_csv_module_writes_is_read(folders: pytest.TempPathFactory, pairs: list[tuple[str, str]]) -> None:
    source = folders.mktemp("csv") / "x.csv"
    with source.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *pairs])
    rows = points(source)["train"].rows
    assert [(row["text"], row["label_keys"][0]) for row in rows] == pairs
