"""Columns as other programs write them: types of lists, classes, nulls, names, blanks, and places in a CSV."""

import ast
import csv
import io
import json
import re
import tokenize
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, LargeList, List, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from extremis.commands.shard import input_url
from pipelines import formats
from pipelines.formats.base import LABELS, Reason
from schemas.errors import InputError
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
def test_lists_of_every_type_are_read_with_their_nulls(lists: Any, strings: pa.DataType, suffix: str, tmp_path: Path) -> None:
    kind = lists(strings)
    given = [["b", " a "], None, ["c", None], ["a", "a"], [None, None]]
    if suffix == "parquet" and pa.types.is_dictionary(strings):
        given.remove(None)  # pyarrow does not write these
    plain = pa.array(given, lists(pa.string()))
    labels = plain if strings == pa.string() else pa.array(given, kind)
    columns = {"key": list("vwxyz")[: len(given)], "text": pa.array(["t"] * len(given)).cast(pa.string()), "labels": labels}
    train = read(put(pa.table(columns), tmp_path / f"data-00000-of-00001.{suffix}"))["train"]
    expected = [sorted({label.strip() for label in row or [] if label}) for row in given]
    assert train.column("label_keys") == [row for row in expected if row]
    assert reasons(train) == [(row + 1, Reason.NO_LABELS) for row, labels in enumerate(expected) if not labels]
