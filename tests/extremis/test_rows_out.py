"""Predictions as rows: every row of the input, in order, with its columns, in files that spreadsheets and we read."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import extremis
from pipelines.formats.from_columns import read_csv
from pipelines.formats.keyed import INPUT
from schemas.errors import InputError
from scoring.exported import Answer
from scoring.prediction_files import Layout, open_writer, prediction_table
from tests.command import call, refused, sets

WORDS = ["sea", "ship", "storm", "cat", "dog", "hill", "river", "moon", "tree", "stone"]
ROWS = [
    {"sku": "=1+1", "text": "sea, a ship; “5 €” | more", "label_1": "x", "note": "'-quoted"},
    {"sku": "A2", "text": "", "label_1": "", "note": "two\nlines"},
    {"sku": "-5", "text": "dog — cat", "label_1": "@y", "note": "-10 % off"},
    {"sku": "", "text": "unknown words alone", "label_1": "z", "note": '"quotes"'},
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    with (folder / "train.csv").open("w", newline="") as file:
        rows = [(f"about {WORDS[n % 10]} and {WORDS[n * 3 % 10]} {n}", WORDS[n % 10]) for n in range(60)]
        csv.writer(file).writerows([("text", "label"), *rows])
    for arguments in (
        ("shard", folder / "train.csv", folder / "data", "--tokenizer", "train:200"),
        ("train", "random", folder / "data", folder / "run", *sets("train.epochs=1", "data.holdout=0.2")),
        ("export", folder / "data", folder / "run", folder / "exported"),
    ):
        done = call(*arguments)
        assert done.status == 0, done.err
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
    assert [*table.columns[:8]] == [*kept, "predicted_label_1", "score_1", "label_2", "score_2"]
    assert [*table.columns[8:]] == ["label_3", "score_3", "decision"]
    shown = [{**row, "sku": {"=1+1": "'=1+1"}.get(row["sku"], row["sku"])} for row in ROWS]
    shown[0]["note"], shown[2]["note"], shown[2]["label_1"] = "''-quoted", "'-10 % off", "'@y"
    assert table[kept].to_dict("records") == shown
    (block,) = read_csv(str(out), 99, None if encoding != "cp1252" else encoding)  # ours gives what was in the input
    read = [row for row in block.to_pylist() if row["\x01fields"]]
    assert [{name: row[name] for name in kept} for row in read] == ROWS
    model = extremis.load(exported)
    expected = [each.labels for each in model.predict([row["text"] for row in ROWS], max_labels=3)]
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
        "--wide writes the columns of INPUT",
    )
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": 1}\n{"text": "b", "n": 2, "late": 3}\n')
    done = call("predict", exported, tmp_path / "a.jsonl", tmp_path / "p.csv", "--wide", "--batch", "1")
    refused(done, "later rows have other columns than the first ones: late beside text, n", "Write .jsonl")
    assert not (tmp_path / "p.csv").exists()


# What every CSV promises, of made-up answers.

CELL = some.text("=+-@'\t\r\n;,\"5.a é", max_size=5)


@settings(deadline=None, max_examples=60)
@given(
    some.lists(some.tuples(CELL, CELL), min_size=1, max_size=6),
    some.lists(CELL, min_size=3, max_size=3),
    some.sampled_from([",", ";", "\t"]),
    some.sampled_from([None, 2]),
    some.data(),
)
def test_every_cell_is_read_back_and_none_is_a_formula(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    keys: list[str],
    separator: str,
    most: int | None,
    data: some.DataObject,
) -> None:
    ids = np.array([data.draw(some.permutations([0, 1, 2]))[:2] for _ in rows])
    ids[np.array(data.draw(some.lists(some.booleans(), min_size=len(rows), max_size=len(rows))))] = -1
    answer = Answer(np.full(ids.shape, -1.5, np.float32), ids, None, None, np.zeros(len(rows), bool))
    given = pa.StructArray.from_arrays([pa.array(column) for column in zip(*rows, strict=True)], ["=a", "label_1"])
    table = pa.table({"key": [str(n) for n in range(len(rows))], INPUT: given})
    labels = pa.table({"key": keys, "text": keys[::-1]})
    folder = tmp_path_factory.mktemp("cells")
    for wide in (True, False):
        out = folder / f"{wide}.csv"
        with open_writer(str(out), None, 3, Layout(wide, most, True, separator)) as write:
            write(prediction_table(table, answer, labels))
        cells = [*csv.reader(io.StringIO(out.read_bytes().decode(), newline=""), delimiter=separator)]
        for cell in (cell for row in cells for cell in row):
            assert cell[:1] not in "=+@\t\r\n" or not cell
            assert cell[:1] != "-" or cell[1:].replace(".", "").replace(",", "").isdigit()
        read = [row for block in read_csv(str(out), 9) for row in block.to_pylist() if row["\x01fields"]]
        if wide:
            assert [(row["=a"], row["label_1"]) for row in read] == rows
            width = most or int((ids >= 0).sum(axis=1).max())
            names = [f"{'predicted_' if n == 1 else ''}label_{n}" for n in range(1, width + 1)]
            found = [[row[name] for name in names] for row in read]
            assert found == [[keys[i] if i >= 0 else "" for i in row][:width] for row in ids.tolist()]
        else:
            pairs = [(str(n), keys[i]) for n, row in enumerate(ids.tolist()) for i in row if i >= 0]
            pairs += [(str(n), "") for n, row in enumerate(ids.tolist()) if max(row) < 0]
            assert sorted((row["key"], row["label"]) for row in read) == sorted(pairs)


def test_a_character_that_the_encoding_lacks_is_named(tmp_path: Path) -> None:
    answer = Answer(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int64), None, None, np.zeros(1, bool))
    table = prediction_table(pa.table({"key": ["k"]}), answer, pa.table({"key": ["č"], "text": [""]}))
    writer = open_writer(str(tmp_path / "p.csv"), None, 1, Layout(encoding="cp1252"))
    with pytest.raises(InputError, match="'č' cannot be written in cp1252"), writer as write:
        write(table)
    assert not (tmp_path / "p.csv").exists()
