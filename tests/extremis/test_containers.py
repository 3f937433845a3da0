"""Texts in every container that people hold: predictions are equal, and anything else is one error."""

import csv
import gzip
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import openpyxl
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import extremis
from pipelines.formats.from_columns import read_csv
from pipelines.formats.keyed import Texts
from schemas.errors import InputError
from scoring.containers import input_url
from scoring.exported import Exported
from scoring.predict import text_fields
from scoring.prediction_files import rows_of_split, rows_of_texts
from tests.command import ROOT, call, environment, refused, sets

WORDS = ["sea", "ship", "storm", "cat", "dog", "hill", "river", "moon", "tree", "stone"]
FIELDS = "key=id,title=name,content=about,labels=of"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set whose title and content have names of their own, and an export of a run on it."""
    folder = tmp_path_factory.mktemp("containers")
    with (folder / "train.csv").open("w", newline="") as file:
        rows = [(f"k{n}", WORDS[n % 10], f"about {WORDS[n * 3 % 10]} {n}", WORDS[n % 10]) for n in range(60)]
        csv.writer(file).writerows([("id", "name", "about", "of"), *rows])
    for arguments in (
        ("shard", folder / "train.csv", folder / "data", "--tokenizer", "train:200", "--fields", FIELDS),
        ("train", "random", folder / "data", folder / "run", *sets("train.epochs=1", "data.holdout=0.2")),
        ("export", folder / "data", folder / "run", folder / "exported"),
    ):
        done = call(*arguments)
        assert done.status == 0, done.err
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> extremis.Model:
    return extremis.load(folder / "exported")


def dictionaries(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"name": name, "about": about} for name, about in pairs]


def table(pairs: list[tuple[str, str]]) -> pa.Table:
    return pa.table(
        {
            name: pa.array([*column], pa.string())
            for name, column in zip(("name", "about"), zip(*pairs, strict=True), strict=True)
        }
    )


COLUMNS: dict[str, Callable[[list[str]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": iter,
    "numpy, objects": lambda texts: np.array(texts, object),
    "pandas Series": pd.Series,
    "pandas Series, other index": lambda texts: pd.Series(texts, index=[f"row {n}" for n in range(len(texts))]),
    "pandas Index": pd.Index,
    "pandas categories": lambda texts: pd.Series(texts).astype("category"),
    "polars Series": pl.Series,
    "Arrow array": pa.array,
    "Arrow chunks": lambda texts: pa.chunked_array([texts[:1], texts[1:]], pa.string()),
    "data set's column": lambda texts: datasets.Dataset.from_dict({"text": texts})["text"],
}
TABLES: dict[str, Callable[[list[tuple[str, str]]], Any]] = {
    "dictionaries": dictionaries,
    "generator of dictionaries": lambda pairs: iter(dictionaries(pairs)),
    "pandas": lambda pairs: pd.DataFrame(dictionaries(pairs)),
    "pandas, other index": lambda pairs: pd.DataFrame(dictionaries(pairs)).set_index(np.arange(len(pairs)) + 7),
    "pandas, other columns": lambda pairs: pd.DataFrame(dictionaries(pairs)).assign(number=1.5, body="other"),
    "pandas of Arrow": lambda pairs: table(pairs).to_pandas(types_mapper=pd.ArrowDtype),
    "polars": lambda pairs: pl.DataFrame(dictionaries(pairs)),
    "Arrow table": table,
    "Arrow batch": lambda pairs: table(pairs).combine_chunks().to_batches()[0],
    "data set": lambda pairs: datasets.Dataset.from_list(dictionaries(pairs)),
    "DuckDB": lambda pairs: duckdb.from_arrow(table(pairs)),
}
text = some.one_of(some.sampled_from([*WORDS, "a ship about the sea", ""]), some.text(max_size=8))
pair = some.tuples(text, text)


def answers(predictions: extremis.Predictions) -> list[tuple[str, Any]]:
    return [(each.text, each.labels) for each in predictions]


@settings(max_examples=12)
@given(some.lists(text, min_size=1, max_size=4))
def test_a_column_of_texts_is_a_list_of_texts(model: extremis.Model, texts: list[str]) -> None:
    expected = answers(model.predict(texts, max_labels=3))
    assert [text for text, _ in expected] == texts
    vectors = model.embed(texts)
    for name, hold in COLUMNS.items():
        assert answers(model.predict(hold(texts), max_labels=3)) == expected, name
        np.testing.assert_array_equal(model.embed(hold(texts)), vectors, name)
    assert answers(model.predict(texts[0], max_labels=3)) == answers(model.predict(np.str_(texts[0]), max_labels=3))


@settings(max_examples=12)
@given(some.lists(pair, min_size=1, max_size=4))
def test_rows_have_the_fields_of_the_data(model: extremis.Model, pairs: list[tuple[str, str]]) -> None:
    expected = answers(model.predict(["\n".join(filter(None, row)) for row in pairs], max_labels=3))
    for name, hold in TABLES.items():
        assert answers(model.predict(hold(pairs), max_labels=3)) == expected, name
    usual = [{"title": title, "content": content} for title, content in pairs]
    assert answers(model.predict(pd.DataFrame(usual), max_labels=3)) == expected


def test_served_texts_have_the_titles_of_the_sharded_ones(folder: Path, model: extremis.Model) -> None:
    exported, data = Exported.open(str(folder / "exported")), str(folder / "data")
    with (folder / "train.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    split = pa.concat_tables(rows_of_split(exported, data, "train")[0])
    expected = dict(zip(split["key"].to_pylist(), split["title_tokens"].to_pylist(), strict=True))
    lengths = [*map(len, split["input_ids"].to_pylist())]
    assert all(0 < title < length for title, length in zip(expected.values(), lengths, strict=True))
    fields, _ = text_fields(exported)
    texts = Texts(str(folder / "train.csv"), made_with=fields)
    served = pa.concat_tables(rows_of_texts(exported, texts, 7))
    ids, titles = (served[name].to_pylist() for name in ("key", "title_tokens"))
    assert dict(zip(ids, titles, strict=True)) == expected
    held = [{name: row[name] for name in ("name", "about")} for row in rows]
    ((_, inputs, _),) = model._batches(model._read(held))
    assert inputs.titles.tolist() == [expected[row["id"]] for row in rows]


def test_rows_may_lack_a_field(model: extremis.Model) -> None:
    rows = [{"about": "of the sea"}, {"name": "ship", "about": None}, {"name": "cat", "about": "and dog"}]
    expected = answers(model.predict(["of the sea", "ship", "cat\nand dog"]))
    for held in (rows, pd.DataFrame(rows), pl.DataFrame(rows), pa.Table.from_pylist(rows[::-1]).slice(0, 3)):
        found = answers(model.predict(held))
        assert (found[::-1] if isinstance(held, pa.Table) else found) == expected


# Each with a pattern of the message: `predict` and `embed` of a model speak of texts, `extremis.predict` of its input.
WRONG: dict[str, tuple[Any, str]] = {
    "None": (None, "got NoneType"),
    "number": (5, "got int"),
    "bytes": (b"a ship", "got bytes"),
    "dictionary": ({"name": "a"}, "got dict"),
    "set": ({"a ship"}, "got set"),
    "array of two dimensions": (np.array([["a"]]), "got ndarray"),
    "array without one": (np.array("a"), "got ndarray"),
    "lazy frame": (pl.LazyFrame({"name": ["a"]}), "got LazyFrame"),
    "null": (["a", None], r"(texts|input)\[1\]: expected a string, got NoneType"),
    "NaN": (pd.Series(["a", "b", np.nan]), r"(texts|input)\[2\]: expected a string, got float: nan"),
    "NA": (pd.Series(["a", pd.NA], dtype="string"), r"(texts|input)\[1\]: expected a string, got NAType"),
    "Arrow's null": (pa.array([None, "a"]), r"(texts|input)\[0\]: expected a string, got NoneType"),
    "rows of rows": ([["a", "b", "c"]], "expected .*, got list"),
    "numbers": (np.arange(3), r"expected .*, got (int64|ndarray)"),
    "surrogate": (["a", "b\ud800"], r"(texts|input)\[1\]: half a surrogate pair at character 1"),
    "surrogate in a row": ([{"name": "\udc00"}], r"(input: .*half a|texts\[0\]: .*half a) surrogate"),
    "a row's null": (pd.DataFrame({"about": ["a", None]}), r"texts\[1\]: text is null"),
    "a text among rows": ([{"name": "a"}, "b"], r"(texts|input)\[0\]: expected a string, got dict"),
    "a number among rows": ([{"name": "a"}, 3], "expected .*, got list"),
    "numbers in a frame": (pd.DataFrame({"name": [1, 2]}), "the column 'name' is of type int64; expected a string"),
    "other columns": (pd.DataFrame({"q": ["a"]}), r"no column 'title' or 'text' or 'content'; found: '?q'?\."),
}


@pytest.mark.parametrize("name", WRONG)
def test_anything_else_is_one_error(model: extremis.Model, folder: Path, tmp_path: Path, name: str) -> None:
    wrong, words = WRONG[name]
    out = tmp_path / "out.csv"
    for call_it in (
        model.predict,
        model.embed,
        lambda held: extremis.predict(folder / "exported", held, out, progress=False),
    ):
        with pytest.raises(extremis.InputError) as raised:
            call_it(wrong)
        assert re.search(words, str(raised.value))
        assert "extremis-input" not in str(raised.value)
        if "got" in words and "[" not in words and not isinstance(wrong, list | np.ndarray):
            assert "expected a list, Series or array of texts, a data frame or table, or rows as" in str(raised.value)
    assert not out.exists()


def test_predict_writes_the_same_for_objects_and_files(folder: Path, tmp_path: Path) -> None:
    """On the command line too, the fields of DATA are the default; keys are those of the rows."""
    pairs = [("sea", "about ships"), ("cat", ""), ("", "a dog by the river")]
    rows = [{"id": f"q{n}", "name": name, "about": about} for n, (name, about) in enumerate(pairs)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pd.DataFrame(rows).to_csv(tmp_path / "rows.csv", index=False)
    assert call("predict", folder / "exported", tmp_path / "rows.jsonl", tmp_path / "expected.csv").status == 0
    expected = (tmp_path / "expected.csv").read_text()
    assert [line.split(",")[0] for line in expected.splitlines()[1::5]] == ["q0", "q1", "q2"]
    frame = pd.DataFrame(rows)
    for held in (tmp_path / "rows.csv", frame, rows, pl.DataFrame(frame), datasets.Dataset.from_pandas(frame)):
        extremis.predict(folder / "exported", held, tmp_path / "out.csv", progress=False, overwrite=True)
        assert (tmp_path / "out.csv").read_text() == expected
    texts = pd.Series([f"{name} {about}".strip() for name, about in pairs])
    extremis.predict(folder / "exported", texts, tmp_path / "out.csv", progress=False, overwrite=True)
    assert (tmp_path / "out.csv").read_text() == expected.replace("\nq", "\n")


NUMBERS = [0, -1, 2.5, 2.0, True, np.True_, "3", float("nan"), [1], np.array([1, 2])]


@pytest.mark.parametrize("wrong", NUMBERS, ids=repr)
def test_a_number_of_labels_is_whole_and_above_0(model: extremis.Model, folder: Path, wrong: Any) -> None:
    for call_it in (
        lambda: model.predict("a", max_labels=wrong),
        lambda: extremis.load(folder / "exported", threads=wrong),
    ):
        with pytest.raises(extremis.InputError, match=r"expected a whole number, 1 or more"):
            call_it()
    if not isinstance(wrong, int) or isinstance(wrong, bool) or wrong < 0:
        with pytest.raises(extremis.InputError, match="unknown label" if isinstance(wrong, str) else "a whole number"):
            model.explain("a", wrong)


@pytest.mark.parametrize("k", [3, np.int64(3), np.uint8(3), 1 << 40])
def test_any_whole_number_is_one(model: extremis.Model, k: Any) -> None:
    assert len(model.predict("a", max_labels=k)[0].labels) == min(int(k), len(model.labels))


@pytest.mark.parametrize("wrong", ["a", float("nan"), True, [0.5]], ids=repr)
def test_a_limit_is_a_number(model: extremis.Model, wrong: Any) -> None:
    for name in ("min_probability", "precision"):
        with pytest.raises(extremis.InputError, match=f"{name}: expected a"):
            model.predict("a", **{name: wrong})


def test_labels_that_are_never_given_are_a_list_of_keys(model: extremis.Model) -> None:
    expected = answers(model.predict(WORDS, never=["sea"]))
    for held in (pd.Series(["sea"]), {"sea"}, ("sea",), np.array(["sea"]), pa.array(["sea"]), pl.Series(["sea"])):
        assert answers(model.predict(WORDS, never=held)) == expected
    for wrong in ("sea", b"sea", 5, {"sea": 1}, pd.DataFrame({"key": ["sea"]})):
        with pytest.raises(extremis.InputError, match="never: expected a list of label keys, got"):
            model.predict(WORDS, never=wrong)


def test_rows_as_dictionaries_keep_a_field_that_the_first_row_lacks(tmp_path: Path) -> None:
    rows = [{"text": "one", "label": "a"}, {"text": "two", "label": "b", "title": "more"}]
    made = extremis.shard(rows, tmp_path / "data", tokenizer="train:100", keep_text=True, progress=False)
    shown = extremis.inspect(tmp_path / "data", rows=2, progress=False).queries
    assert sorted(str(query["text"]) for query in shown or ()) == ["more two", "one"]
    assert made.labels == 2


def test_no_library_of_frames_is_imported(folder: Path) -> None:
    code = (
        "import importlib.abc, sys\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name in ('pandas', 'polars', 'datasets', 'torch', 'scipy'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"import extremis, pyarrow as pa; model = extremis.load({str(folder / 'exported')!r})\n"
        "tables = pa.table({'name': ['sea'], 'about': ['ships']}), [{'name': 'sea', 'about': 'ships'}]\n"
        "assert model.predict(tables[0]) == model.predict(tables[1]) == model.predict('sea\\nships')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment({"PYTHONPATH": str(ROOT)}), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_an_export_records_the_fields_of_its_data(folder: Path) -> None:
    parameters = Exported.open(str(folder / "exported")).table.parameters
    assert parameters["texts"] == {"fields": FIELDS, "text": "title+content"}


# Predictions as rows: every row of the input, in order, with its columns.

ROWS = [
    {"sku": "=1+1", "text": "sea, a ship; “5 €” | more", "label_1": "x", "note": "'-quoted"},
    {"sku": "A2", "text": "", "label_1": "", "note": "two\nlines"},
    {"sku": "-5", "text": "dog — cat", "label_1": "@y", "note": "-10 % off"},
    {"sku": "", "text": "unknown words alone", "label_1": "z", "note": '"quotes"'},
]


@pytest.fixture(scope="module")
def exported(folder: Path) -> Path:
    return folder / "exported"


def write_csv(path: Path, encoding: str, separator: str) -> None:
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerows([[*ROWS[0]], *(row.values() for row in ROWS)])


@pytest.mark.parametrize(
    ("encoding", "separator"), [("cp1252", ";"), ("utf-16", "\t"), ("utf-8-sig", ","), ("utf-8", "|")]
)
def test_a_csv_comes_back_with_its_columns(exported: Path, tmp_path: Path, encoding: str, separator: str) -> None:
    source, out = tmp_path / "in.csv", tmp_path / "out.csv"
    write_csv(source, encoding, separator)
    stated = ("--encoding", "cp1252") if encoding == "cp1252" else ()
    done = call("predict", exported, source, out, "--wide", "--max-labels", "3", *stated)
    assert done.status == 0, done.err
    assert out.read_bytes()[:2] == source.read_bytes()[:2] or encoding == "cp1252"
    table = pd.read_csv(out, sep=separator, encoding=encoding, dtype=str, keep_default_na=False)  # another reader
    kept = ["sku", "text", "label_1", "note"]
    assert [*table.columns[:8]] == [*kept, "predicted_label_1", "probability_1", "label_2", "probability_2"]
    assert [*table.columns[8:]] == ["label_3", "probability_3", "decision", "none_of_these"]
    shown = [{**row, "sku": {"=1+1": "'=1+1"}.get(row["sku"], row["sku"])} for row in ROWS]
    shown[2]["note"], shown[2]["label_1"] = "'-10 % off", "'@y"
    assert table[kept].to_dict("records") == shown
    stated_encoding = "cp1252" if encoding == "cp1252" else None
    read, given = (
        [row for block in read_csv(str(path), 99, stated_encoding) for row in block.to_pylist() if row["\x01fields"]]
        for path in (out, source)
    )
    assert [{name: row[name] for name in kept} for row in read] == [{name: row[name] for name in kept} for row in given]
    model = extremis.load(exported)
    predicted = model.predict([row["text"] for row in ROWS], max_labels=3)
    expected = [[label.key for label in each.labels] for each in predicted]
    assert [[row[f"{'predicted_' if n == 1 else ''}label_{n}"] for n in (1, 2, 3)] for row in read] == expected
    again = call("predict", exported, out, tmp_path / "again.csv", "--wide", "--max-labels", "1", *stated)
    assert again.status == 0, again.err
    assert "predicted_predicted_label_1" in (tmp_path / "again.csv").read_text(encoding=encoding)


def jsonl(path: Path) -> None:
    rows = [{**row, "labels": ["old", None], "price": 1.5, "more": {"a": [1]}} for row in ROWS]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")


def parquet(path: Path) -> None:
    pq.write_table(
        pa.table({"price": [1.5, None, -2, 0], "labels": [["old"]] * 4, "text": [r["text"] for r in ROWS]}), path
    )


def lines(path: Path) -> None:
    path.write_bytes(gzip.compress("\n".join(row["text"] for row in ROWS).encode()))


@pytest.mark.parametrize(("name", "write"), [("in.jsonl", jsonl), ("in.parquet", parquet), ("in.txt.gz", lines)])
@pytest.mark.parametrize("to", ["jsonl", "parquet", "csv"])
def test_rows_of_any_format_are_kept_in_any_format(
    exported: Path, tmp_path: Path, name: str, write: Callable[[Path], None], to: str
) -> None:
    write(tmp_path / name)
    given: list[dict[str, Any]] = [{"text": row["text"]} for row in ROWS]
    if name == "in.jsonl":
        given = [json.loads(line) for line in (tmp_path / name).read_text().splitlines() if line]
    if name == "in.parquet":
        given = pq.read_table(tmp_path / name).to_pylist()
    out = tmp_path / f"out.{to}"
    done = call("predict", exported, tmp_path / name, out, "--wide", "--max-labels", "2", "--batch", "2")
    assert done.status == 0, done.err
    added = ["predicted_labels" if "labels" in given[0] else "labels", "scores", "texts", "decision"]
    if to == "csv":
        with out.open(newline="") as file:
            read = list(csv.DictReader(file))
        assert [*read[0]][: len(given[0])] == [*given[0]]
        assert [row["text"] for row in read] == [row["text"] for row in given]
        assert {row["price"] for row in read if "price" in row} <= {"1.5", "", "-2.0", "0.0"}
    else:
        read = pq.read_table(out).to_pylist() if to == "parquet" else [*map(json.loads, out.open())]
        assert [{field: row[field] for field in given[0]} for row in read] == given
        assert {*added} <= {*read[0]}
        assert [len(row[added[0]]) for row in read] == [2] * 4


def test_a_spreadsheet_in_is_a_csv_that_it_opens(exported: Path, tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    for row in [
        ("text", "day", "n"),
        ("sea and ship", pd.Timestamp("2024-03-01"), 3.0),
        (None, None, None),
        (None, None, 4),
    ]:
        book.active.append(row)
    book.save(tmp_path / "in.xlsx")
    done = call("predict", exported, tmp_path / "in.xlsx", tmp_path / "out.csv", "--wide", "--max-labels", "1")
    assert done.status == 0, done.err
    assert (tmp_path / "out.csv").read_bytes().startswith("\ufefftext,day,n,label_1".encode())
    rows = pd.read_csv(tmp_path / "out.csv", dtype=str, keep_default_na=False)
    assert rows[["text", "day", "n"]].values.tolist() == [["sea and ship", "2024-03-01", "3"], ["", "", "4"]]
    refused(
        call("predict", exported, tmp_path / "in.xlsx", tmp_path / "in.xlsx", "--to", "csv", "--overwrite"), "reads"
    )


def test_what_cannot_be_wide_is_refused(exported: Path, tmp_path: Path) -> None:
    write_csv(tmp_path / "in.csv", "utf-8", ",")
    done = call("predict", exported, tmp_path / "in.csv", tmp_path / "p.npz", "--wide")
    refused(done, "--wide works only with csv, jsonl, parquet, but OUT is npz", "--to csv")
    refused(
        call("predict", exported, tmp_path / "p.csv", "--data", tmp_path, "--wide"),
        "--wide needs the columns of INPUT",
    )
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": 1}\n{"text": "b", "n": 2, "late": 3}\n')
    done = call("predict", exported, tmp_path / "a.jsonl", tmp_path / "p.csv", "--wide", "--batch", "1")
    refused(done, "later rows have other columns than the first ones: late beside text, n", "Write .jsonl")
    assert not (tmp_path / "p.csv").exists()


def test_standard_input_without_a_text_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(InputError, match="standard input is empty"), input_url("-", "text"):
        raise AssertionError
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"text")))
    with pytest.raises(InputError, match="standard input, line 1: x"), input_url("-", "csv") as url:
        raise InputError(f"{url}/input.csv, line 1: x")
