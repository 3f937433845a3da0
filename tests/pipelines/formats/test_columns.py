"""Columns as other programs write them: types of lists, classes, nulls, names, blanks, and places in a CSV."""

import ast
import csv
import io
import json
import re
import tokenize
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, LargeList, List, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import formats
from pipelines.formats.base import LABELS, Fields, Part, Reason, RowContents
from pipelines.formats.from_columns import parse_pairs, parse_points
from schemas.errors import InputError
from scoring.containers import input_url
from tests.pipelines.formats.forms import Table, read_all

CASES = Path(__file__).parents[2] / "cases"


def read(source: Path | str) -> dict[str, Table]:
    return read_all(formats.choose(str(source)), source)[1]


def keys_and_labels(table: Table) -> list[tuple[str, list[str]]]:
    return [(row["key"], row["label_keys"]) for row in table.rows]


def reasons(table: Table) -> list[tuple[int, Reason]]:
    return [(reject.line, reject.reason) for reject in table.rejects]


def test_case_list_cell_without_commas() -> None:
    folder = CASES / "list-cell-without-commas"
    assert read(folder / "train.csv")["train"].column("label_keys") == [["sea", "ships"], ["flower"]]
    train = read(folder / "json-null.csv")["train"]
    assert train.column("label_keys") == [["sea"]]
    assert reasons(train) == [(3, Reason.NO_LABELS), (4, Reason.MALFORMED)]
    with (folder / "tate1000.csv").open(newline="", encoding="utf-8") as file:
        expected = {
            row["key"]: {
                ast.literal_eval(token.string)
                for token in tokenize.generate_tokens(io.StringIO(row["labels"]).readline)
                if token.type == tokenize.STRING
            }
            for row in csv.DictReader(file)
        }
    train = read(folder / "tate1000.csv")["train"]
    assert {key: {*labels} for key, labels in keys_and_labels(train)} == expected
    assert len(expected) == 100
    assert not train.rejects


def test_case_hf_classlabel() -> None:
    for name in ("cl_fixed", "cl_large"):
        tables = read(CASES / "hf-classlabel" / name)
        assert tables["train"].column("label_keys")[:3] == [["sea", "ships"], ["ships", "tree"], ["sea", "tree"]]
        assert {*tables[LABELS].column("key")} == {"sea", "ships", "tree"}
    tables = read(CASES / "hf-classlabel" / "cl_minus1")
    assert tables["train"].column("label_keys")[:3] == [["sea"], ["ships"], ["tree"]]
    assert reasons(tables["test"]) == [(line, Reason.NO_LABELS) for line in range(1, 11)]


@pytest.mark.parametrize(
    ("name", "rows", "rejected"),
    [
        ("p_listnull", 60, [(1, Reason.NO_LABELS)]),
        ("p_nulltitle", 120, []),
        ("q1", 60, []),
        ("q11", 60, []),
        ("q4", 60, []),
    ],
)
def test_case_parquet_null_column(name: str, rows: int, rejected: list[tuple[int, Reason]]) -> None:
    tables = read(CASES / "parquet-null-column" / name)
    assert len(tables["train"].rows) == rows
    assert reasons(tables["train"]) == rejected
    assert not tables[LABELS].rejects


@pytest.mark.parametrize(("name", "twice"), [("p_dup", "text"), ("q5", "labels"), ("q6", "key")])
def test_case_parquet_duplicate_columns(name: str, twice: str) -> None:
    with pytest.raises(InputError, match=rf"parquet: two columns are called '{twice}'; found: key, text, labels, "):
        read(CASES / "parquet-duplicate-columns" / name)


@pytest.mark.parametrize(("name", "reason"), [("p_fsl", Reason.NO_LABELS), ("q8", Reason.MISSING_FIELD)])
def test_case_parquet_fixed_list_null(name: str, reason: Reason) -> None:
    train = read(CASES / "parquet-fixed-list-null" / name)["train"]
    assert len(train.rows) == 59
    assert reasons(train) == [(6, reason)]


def put(table: pa.Table, path: Path) -> Path:
    """Write a table as the kind of file that `path` ends with."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    return path


STRINGS = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.int32(), pa.large_string()),
]
LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda kind: pa.list_(kind, 2)]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("strings", STRINGS, ids=str)
@pytest.mark.parametrize("lists", LISTS, ids=["list", "large", "view", "large view", "fixed"])
def test_lists_of_every_type_are_read_with_their_nulls(
    lists: Any, strings: pa.DataType, suffix: str, tmp_path: Path
) -> None:
    kind = lists(strings)
    given = [["b", " a "], None, ["c", None], ["a", "a"], [None, None]]
    if suffix == "parquet" and pa.types.is_dictionary(strings):
        given.remove(None)  # pyarrow does not write these
    plain = pa.array(given, lists(pa.string()))
    labels = plain if strings == pa.string() else pa.array(given, kind)
    columns = {
        "key": list("vwxyz")[: len(given)],
        "text": pa.array(["t"] * len(given)).cast(pa.string()),
        "labels": labels,
    }
    train = read(put(pa.table(columns), tmp_path / f"data-00000-of-00001.{suffix}"))["train"]
    expected = [sorted({label.strip() for label in row or [] if label}) for row in given]
    assert train.column("label_keys") == [row for row in expected if row]
    assert reasons(train) == [(row + 1, Reason.NO_LABELS) for row, labels in enumerate(expected) if not labels]


def test_null_in_an_array_of_duckdb_is_not_called_damage(tmp_path: Path) -> None:
    rows = duckdb.sql("SELECT 'a' AS text, ['x', 'y']::VARCHAR[2] AS labels UNION ALL SELECT 'b', NULL")
    rows.write_parquet(str(tmp_path / "train.parquet"))
    with pytest.raises(InputError, match=r"Arrow cannot read these lists: .*Write a null list as an empty list"):
        read(tmp_path / "train.parquet")


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_an_arrow_file_with_a_footer_is_read_as_its_stream(compression: str | None, tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b", "c"], "label": pa.array(["x", "y", "x"]).dictionary_encode()})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(tmp_path / "data-00000-of-00001.arrow", table.schema, options=options) as file:
        file.write_table(table, max_chunksize=2)
    assert read(tmp_path)["train"].column("label_keys") == [["x"], ["y"], ["x"]]


CLASSES = ["sea", " ships", "tree"]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.none() | st.integers(-1, 2), min_size=2, max_size=2) | st.none(), min_size=1, max_size=12),
    st.sampled_from(LISTS),
    st.sampled_from([pa.int64(), pa.int8()]),
    st.sampled_from([{"feature": "x"}, {"feature": "x", "length": 2, "_type": "Sequence"}, ["x"]]),
    st.sampled_from(["parquet", "arrow"]),
)
def test_classes_in_lists_of_any_type_are_names(
    tmp_path_factory: pytest.TempPathFactory, given: Any, lists: Any, number: pa.DataType, feature: Any, suffix: str
) -> None:
    one = {"names": CLASSES, "_type": "ClassLabel"}
    of_labels = [one] if isinstance(feature, list) else {**feature, "feature": one}
    metadata = {"huggingface": json.dumps({"info": {"features": {"text": {}, "labels": of_labels}}})}
    schema = pa.schema([("text", pa.string()), ("labels", lists(number))], metadata)
    table = pa.table(
        {"text": [str(row) for row in range(len(given))], "labels": pa.array(given, lists(number))}, schema
    )
    path = put(table, tmp_path_factory.mktemp("classes") / f"data-00000-of-00001.{suffix}")
    train = read(path)["train"]
    found = [sorted({CLASSES[n].strip() for n in row or [] if n is not None and n >= 0}) for row in given]
    assert train.column("label_keys") == [labels for labels in found if labels]
    assert reasons(train) == [(row + 1, Reason.NO_LABELS) for row, labels in enumerate(found) if not labels]


@pytest.mark.parametrize("feature", [List(ClassLabel(names=CLASSES)), LargeList(ClassLabel(names=CLASSES))])
def test_classes_that_datasets_saves_are_names(feature: Any, tmp_path: Path) -> None:
    rows = {"text": ["a", "b", "c"], "labels": [[0, 1], [-1], []]}
    saved = Dataset.from_dict(rows, Features({"text": Value("string"), "labels": feature}))
    saved.save_to_disk(str(tmp_path / "saved"))
    saved.to_parquet(str(tmp_path / "x.parquet"))
    for source in ("saved", "x.parquet"):
        train = read(tmp_path / source)["train"]
        assert train.column("label_keys") == [["sea", "ships"]]
        assert reasons(train) == [(2, Reason.NO_LABELS), (3, Reason.NO_LABELS)]


KINDS = {
    "key": pa.string(),
    "text": pa.string(),
    "title": pa.string(),
    "labels": pa.list_(pa.string()),
    "feature_ids": pa.list_(pa.int64()),
    "feature_values": pa.list_(pa.float64()),
    "vector": pa.list_(pa.float32()),
}
FULL = {
    "key": "k",
    "text": "t",
    "title": "u",
    "labels": ["a"],
    "feature_ids": [1],
    "feature_values": [2],
    "vector": [3],
}


@pytest.mark.parametrize("column", KINDS)
def test_a_column_of_nulls_is_a_column_of_its_type_with_nulls(column: str) -> None:
    part = Part("train", "f", {}, contents=RowContents(features=True, dense=1))
    empty = [None, []] if pa.types.is_list(KINDS[column]) else [None]
    for value in empty:
        parsed = []
        for kind in (KINDS[column], pa.list_(pa.null()) if value == [] else pa.null()):
            schema = pa.schema([*(KINDS | {column: kind}).items()])
            (batch,) = pa.Table.from_pylist([FULL | {column: value}] * 2, schema).to_batches()
            parsed.append(parse_points(batch, 0, part, Fields(), "title+content"))
        assert parsed[0].batch.equals(parsed[1].batch)
        assert parsed[0].rejects == parsed[1].rejects
    (batch,) = pa.table({"query_key": ["q"], "label_key": ["a"], "weight": pa.nulls(1)}).to_batches()
    assert [reject.reason for reject in parse_pairs(batch, 0, "f", Fields()).rejects] == [Reason.WRONG_TYPE]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet", "arrow", "frame", "table"])
@pytest.mark.parametrize("column", ["key", "text", "labels", "other"])
def test_two_columns_of_one_name_are_one_error(suffix: str, column: str, tmp_path: Path) -> None:
    names, values = ["key", "text", "labels", "other", column], [["k"], ["t"], ["a"], ["o"], ["x"]]
    table, source = pa.table(values, names), tmp_path / f"train.{suffix}"
    if suffix in ("csv", "tsv"):
        source.write_text("\n".join(("\t" if suffix == "tsv" else ",").join(row) for row in (names, "ktaox")))
    elif suffix in ("parquet", "arrow"):
        put(table, source)
    given = {"frame": pd.DataFrame([list("ktaox")], columns=names), "table": table}.get(suffix, source)
    said = rf"two columns are called '{column}'; found: key, text, labels, other, {column}\."
    with pytest.raises(InputError, match=said), input_url(given) as url:
        read(url)


BLANKS = st.text(" \t\n\u00a0\u2003", max_size=2)
NAME = st.sampled_from(["sea", "the sea", "a, b", "x"])
SPACED = st.lists(st.tuples(BLANKS, NAME, BLANKS), min_size=1, max_size=3)


@settings(deadline=None, max_examples=4)
@given(st.lists(SPACED, min_size=20, max_size=40))
def test_blanks_around_labels_are_no_part_of_them_in_any_form(
    tmp_path_factory: pytest.TempPathFactory, given: list[list[tuple[str, str, str]]]
) -> None:
    root = tmp_path_factory.mktemp("blanks")
    rows = [{"key": str(n), "text": "t", "labels": ["".join(part) for part in row]} for n, row in enumerate(given)]
    cells = [{**row, "labels": "|".join(row["labels"])} for row in rows]
    expected = [(str(n), sorted({name for _, name, _ in row})) for n, row in enumerate(given)]
    sources: dict[str, Any] = {
        f"train.{suffix}": root / f"train.{suffix}" for suffix in ("csv", "jsonl", "parquet", "arrow")
    }
    pd.DataFrame(cells).to_csv(root / "train.csv", index=False)
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for suffix in ("parquet", "arrow"):
        put(pa.Table.from_pylist(rows), root / f"train.{suffix}")
    sources |= {"frame": pd.DataFrame(rows), "frame of cells": pd.DataFrame(cells), "rows": rows, "cells": cells}
    sources |= {"table of cells": pa.Table.from_pylist(cells)}
    (root / "cells.jsonl").write_text("".join(json.dumps(row) + "\n" for row in cells))
    put(pa.Table.from_pylist(cells), root / "cells.parquet")
    sources |= {"cells.jsonl": root / "cells.jsonl", "cells.parquet": root / "cells.parquet"}
    if not any(set("\t\n") & {*cell["labels"]} for cell in cells):
        lines = ["\t".join(cell.values()) for cell in cells]
        (root / "train.tsv").write_text("\n".join(["key\ttext\tlabels", *lines, ""]))
        sources["train.tsv"] = root / "train.tsv"
    for name, source in sources.items():
        with input_url(source) as url:
            tables = read_all(formats.choose(url), url, 100)[1]
        assert keys_and_labels(tables["train"]) == expected, name
        assert {*tables[LABELS].column("key")} == {label for _, labels in expected for label in labels}, name


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_blanks_around_labels_are_no_part_of_them_in_tables_of_labels_and_pairs(suffix: str, tmp_path: Path) -> None:
    tables = {
        "queries": [{"key": " q", "text": "t"}],
        "labels": [{"key": " sea ", "text": "the sea"}, {"key": "  ", "text": "none"}],
        "pairs_train": [{"query_key": " q", "label_key": "\u00a0sea"}, {"query_key": " q", "label_key": " "}],
    }
    for name, rows in tables.items():
        kind = "parquet" if suffix == "parquet" else suffix if name == "pairs_train" or suffix == "jsonl" else "csv"
        path = tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pd.DataFrame(rows).to_csv(path, index=False, sep="\t" if kind == "tsv" else ",")
    found = read(tmp_path)
    headers = suffix in ("csv", "tsv")
    assert found["train"].column("key") == [" q"]
    assert [(row["query_key"], row["label_key"]) for row in found["pairs/train"].rows] == [(" q", "sea")]
    assert reasons(found["pairs/train"]) == [(2 + headers, Reason.MALFORMED)]
    assert found[LABELS].column("key") == ["sea"]
    assert reasons(found[LABELS]) == [(2 + headers, Reason.MALFORMED)]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"text": ["a", "b\ud800"], "label": ["x", "y"]},
            r"the column 'text' cannot be read: .*half a surrogate pair in 'b\\ud800'",
        ),
        (
            {"text": ["a", "b"], "label": ["x", "\udc00"]},
            r"the column 'label' cannot be read: .*half a surrogate pair in '\\udc00'",
        ),
        (
            {"text": ["a", "b"], "labels": [["x"], ["\udc00"]]},
            r"the column 'labels' cannot be read: .*half a surrogate",
        ),
        ({"text": ["a", "b"], "label": [1, "x"]}, "the column 'label' cannot be read: .*Expected values of one type"),
        ({"text": ["a", "b"], "labels": [["x"], "x"]}, "the column 'labels' cannot be read"),
    ],
)
@pytest.mark.parametrize("kind", ["frame", "rows", "pairs"])
def test_values_that_are_no_column_are_an_error(columns: dict[str, list[Any]], said: str, kind: str) -> None:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    frame = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})
    given = {"frame": frame, "rows": rows, "pairs": [tuple(row.values()) for row in rows]}
    with pytest.raises(InputError, match=said.replace("'label'", "'labels?'")) as caught, input_url(given[kind]):
        pass
    assert "\n" not in str(caught.value)


def test_a_field_of_later_rows_is_not_left_out() -> None:
    with input_url([{"text": "a", "label": "x"}, {"text": "b", "label": "y", "key": "k"}]) as url:
        train = read(url)["train"]
    assert (train.column("key"), reasons(train)) == (["k"], [(1, Reason.MISSING_FIELD)])


CELL = st.text('ab",\r\n é', max_size=5)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(CELL, st.sampled_from(["x", "", "[x y"])), max_size=8), st.integers(1, 4), st.booleans())
def test_rejects_of_a_csv_name_the_line_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], block: int, mark: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "train.csv"
    out, expected = io.StringIO(newline=""), []
    writer = csv.writer(out)
    writer.writerow(["text", "label"])
    for text, label in rows:
        if text and not label:  # without both, it is an empty row
            expected.append(1 + len(re.findall("\r\n|\r|\n", out.getvalue())))
        writer.writerow([text, label])
    path.write_bytes("\ufeff".encode() * mark + out.getvalue().encode())
    train = read_all("csv", path, block)[1]["train"]
    assert reasons(train) == [(line, Reason.NO_LABELS) for line in expected]
    assert [(row["text"], row["label_keys"]) for row in train.rows] == [
        (text, [label]) for text, label in rows if label
    ]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(CELL, st.just("x"))), CELL, st.booleans(), st.sampled_from(["open", "after", "bytes"]))
def test_an_error_of_a_csv_names_the_line(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], rest: str, mark: bool, fault: str
) -> None:
    path = tmp_path_factory.mktemp("places") / "train.csv"
    out = io.StringIO(newline="")
    csv.writer(out).writerows([("text", "label"), *rows])
    before = "\ufeff".encode() * mark + out.getvalue().encode()
    damage = {"open": b'"a', "after": b'"a"b,x\r\n', "bytes": b"a\xff,x\r\n"}[fault]
    rest = rest.replace('"', "")
    path.write_bytes(before + damage + rest.encode())
    line = 1 + len(re.findall("\r\n|\r|\n", before.decode()))
    with pytest.raises(InputError, match=rf"train\.csv, line {line}: not (CSV|UTF-8)") as caught:
        read_all("csv", path)
    assert "\n" not in str(caught.value)
