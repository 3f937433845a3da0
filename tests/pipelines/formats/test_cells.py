"""Cells that name several labels: what programs write for lists of strings is read as these strings, or not at all."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import orjson
import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats.base import InvalidRecord, Reason
from pipelines.formats.from_lines import split_cell, split_cells
from tests.pipelines.formats.forms import read_all

NOT_READ = None
CELLS: dict[str, list[str] | None] = {
    "": [],
    "  ": [],
    "sea| ships ;;|": ["sea", "ships"],
    "(a)": ["(a)"],
    "(a)|b": ["(a)", "b"],
    "[sic] a|b": ["[sic] a", "b"],
    '"Hamlet"': ['"Hamlet"'],
    "[]": [],
    "[ ]": [],
    '["sea", null]': ["sea"],
    '["sea", 5, -1.50, 1e5]': ["sea", "5", "-1.50", "1e5"],
    '["a\\"b", "\\ud83d\\ude00", "\\u00e9"]': ['a"b', "😀", "é"],
    '["\\ud800"]': NOT_READ,
    "[NaN]": [],
    '[["x", "y"]]': NOT_READ,
    '[{"a": "b"}]': NOT_READ,
    '{"a": "b"}': NOT_READ,
    "[true]": NOT_READ,
    "['a', True]": NOT_READ,
    "['a', 5, None, nan]": ["a", "5"],
    "['it\\'s', \"it's\", 'a\\\\b', 'a\\nb', '\\xe9\\u00e9\\U0001f600']": ["it's", "it's", "a\\b", "a\nb", "éé😀"],
    "['\\q']": NOT_READ,
    "['\\U00110000']": NOT_READ,
    "['a', 'b',]": ["a", "b"],
    "['a' 'b', 'c']": NOT_READ,
    "['a', , 'b']": NOT_READ,
    "['a'": ["['a'"],
    "['a', b'c']": NOT_READ,
    "[np.str_('a'), np.str_('b')]": NOT_READ,
    "[datetime.date(2020, 1, 1)]": NOT_READ,
    "[a]|[b]": NOT_READ,
    "('a', 'b')": ["a", "b"],
    "('a',)": ["a"],
    "{'a', 'b'}": ["a", "b"],
    '"b" "c"': ["b", "c"],
    "'a', 'b'": ["a", "b"],
    "['sea' 'ships']": ["sea", "ships"],
    "['sea' \"Dante, 'D'\"\n 'a | b' nan 5]": ["sea", "Dante, 'D'", "a | b", "5"],
    "['a' 'b' ... 'y' 'z']": NOT_READ,
    "[['a' 'b']\n ['c' 'd']]": NOT_READ,
    "[1 2 3]": NOT_READ,
    "[nan nan]": NOT_READ,
    "[5]": ["5"],
    "[sea]": ["sea"],
    "[sea, ships, 'Dante, \\'D', a | b]": ["sea", "ships", "Dante, 'D", "a | b"],
    "[(a), b c, 'NULL', NULL]": ["(a)", "b c", "NULL"],
    "[sea, None]": NOT_READ,  # DuckDB's list of the labels "sea" and "None", or somebody's list with nothing in it
    "['a, b', nan]": NOT_READ,
    "[None]": [],
    "['nan', \"None\", 'null']": ["nan", "None", "null"],
    "[...]": NOT_READ,
}


def read(cell: str) -> list[str] | None:
    try:
        return split_cell(cell, "labels")
    except InvalidRecord:
        return NOT_READ


@pytest.mark.parametrize(("cell", "labels"), CELLS.items())
def test_a_cell_is_read_whole_or_not_at_all(cell: str, labels: list[str] | None) -> None:
    assert read(cell) == labels
    if labels is NOT_READ:
        with pytest.raises(InvalidRecord, match=r'^labels: .* is no list of labels: .*Write \["a", "b"\]'):
            split_cell(cell, "labels")


@settings(deadline=None)
@given(st.lists(st.sampled_from([*CELLS]) | st.text("[]('\",| ;a\\5\u00a0", max_size=8), max_size=6))
def test_a_column_of_cells_is_read_as_each_cell(cells: list[str]) -> None:
    refused = dict[int, str]()
    offsets, labels = split_cells(
        pa.array(cells, pa.string()), "labels", lambda row, _, detail: refused.update({row: detail})
    )
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), labels).to_pylist()
    assert [None if row in refused else labels for row, labels in enumerate(lists)] == [*map(read, cells)]
    assert all(lists[row] == [] for row in refused)


def by_csv(dress: Callable[[list[str]], str]) -> Callable[[Path, list[list[str]]], None]:
    """Write lists with the csv module, each as the text that `dress` makes of it."""

    def write(path: Path, lists: list[list[str]]) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = [[str(row), "a ship", dress(labels)] for row, labels in enumerate(lists)]
            csv.writer(file).writerows([["key", "text", "labels"], *rows])

    return write


def by_pandas(dress: Callable[[list[str]], Any]) -> Callable[[Path, list[list[str]]], None]:
    def write(path: Path, lists: list[list[str]]) -> None:
        cells = pd.Series([dress(labels) for labels in lists], dtype=object)
        pd.DataFrame({"key": range(len(lists)), "text": "a ship", "labels": cells}).to_csv(path, index=False)

    return write


def by_datasets(path: Path, lists: list[list[str]]) -> None:
    with path.open("wb") as file:
        columns = {"key": [*map(str, range(len(lists)))], "text": ["a ship"] * len(lists), "labels": lists}
        Dataset.from_dict(columns).to_csv(file, index=False)


def by_duckdb(path: Path, lists: list[list[str]]) -> None:
    rows = pa.table({"key": range(len(lists)), "text": ["a ship"] * len(lists), "labels": lists})
    duckdb.from_arrow(rows).write_csv(str(path))


WRITERS: dict[str, Callable[[Path, list[list[str]]], None]] = {
    "json": by_csv(json.dumps),
    "orjson": by_csv(lambda labels: orjson.dumps(labels).decode()),
    "repr": by_csv(repr),
    "repr of tuples": by_csv(lambda labels: repr(tuple(labels))),
    "pandas": by_pandas(list),
    "pandas, arrays": by_pandas(lambda labels: np.array(labels, object)),
    "pandas, arrays of str": by_pandas(lambda labels: np.array(labels, str)),
    "datasets": by_datasets,
    "duckdb": by_duckdb,
}
LABEL = st.text("ab ,'\"[](){}|;\\\n\r.5é😀\u00a0:=", min_size=1, max_size=6) | st.sampled_from(
    ["None", "nan", "NaN", "NULL", "null", "True", "false", "5", "-1.5", "1 2", "...", "a ... b", "<NA>", "(a)", "\\n"]
)
LISTS = st.lists(st.lists(LABEL.filter(str.strip), min_size=1, max_size=4), min_size=1, max_size=8)
DOUBTFUL = re.compile(r"(?:None|nan|NaN|<NA>|True|false|\.\.\.|[-.0-9]|\s)+")  # DuckDB writes these without quotes


@pytest.mark.parametrize("writer", WRITERS)
@settings(deadline=None, max_examples=20)
@given(LISTS)
def test_what_programs_write_for_lists_is_read_back_or_rejected(
    writer: str, tmp_path_factory: pytest.TempPathFactory, lists: list[list[str]]
) -> None:
    path = tmp_path_factory.mktemp("lists") / "train.csv"
    WRITERS[writer](path, lists)
    train = read_all("csv", path, 3)[1]["train"]
    found = {int(row["key"]): row["label_keys"] for row in train.rows}
    assert all(found[row] == sorted({label.strip() for label in lists[row]}) for row in found)
    rejected = [labels for row, labels in enumerate(lists) if row not in found]
    assert len(train.rejects) == len(rejected)
    assert all(writer == "duckdb" and any(map(DOUBTFUL.fullmatch, labels)) for labels in rejected)


def test_an_array_that_numpy_shortens_is_a_reject(tmp_path: Path) -> None:
    WRITERS["pandas, arrays"](tmp_path / "train.csv", [["a"], [*map(str, range(2000))]])
    train = read_all("csv", tmp_path)[1]["train"]
    assert [row["label_keys"] for row in train.rows] == [["a"]]
    assert [(reject.line, reject.reason) for reject in train.rejects] == [(3, Reason.MALFORMED)]
