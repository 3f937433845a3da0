"""Spreadsheets as input: what openpyxl and pandas write is read as the texts that a person sees."""

import datetime
import sys
import zipfile
from pathlib import Path
from typing import Any

import openpyxl
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats import base, choose
from pipelines.formats.base import Reason
from pipelines.formats.keyed import Texts
from schemas.errors import InputError
from scoring.containers import input_url
from tests.pipelines.formats.forms import read_all


def book(path: Path, rows: list[list[Any]]) -> str:
    made = openpyxl.Workbook()
    for row in rows:
        made.active.append(row)
    made.create_sheet("notes").append(["another sheet"])
    made.save(path)
    return str(path)


def rows_of(url: str) -> list[dict[str, str]]:
    with input_url(url) as folder, pa.ipc.open_stream(next(Path(folder).glob("*/*.arrow"))) as stream:
        return stream.read_all().to_pylist()


VALUES = [
    (12, "12"),
    (3.0, "3"),
    (2.5, "2.5"),
    (4006381333931, "4006381333931"),
    (True, "TRUE"),
    (None, ""),
    (datetime.date(2024, 3, 1), "2024-03-01"),
    (datetime.datetime(2024, 3, 1, 10, 30), "2024-03-01T10:30:00"),
    (datetime.time(7, 5), "07:05:00"),
    ("0012", "0012"),
    ("'=1+1", "'=1+1"),
    ("two\nlines, „quoted“", "two\nlines, „quoted“"),
]


@pytest.mark.parametrize("by_pandas", [False, True])
def test_values_are_texts(by_pandas: bool, tmp_path: Path) -> None:
    rows = [[f"text {n}", value] for n, (value, _) in enumerate(VALUES)]
    url = str(tmp_path / "x.xlsx")
    if by_pandas:
        pd.DataFrame(rows, columns=["text", "label"], dtype=object).to_excel(url, index=False)
    else:
        book(Path(url), [["text", "label"], *rows])
    assert rows_of(url) == [{"text": f"text {n}", "label": shown} for n, (_, shown) in enumerate(VALUES)]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), min_size=1), min_size=1))
def test_any_text_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    sheet = openpyxl.Workbook(write_only=True)
    page = sheet.create_sheet()
    for text in ("text", *texts):
        cell = openpyxl.cell.WriteOnlyCell(page, text)
        cell.data_type = "s"
        page.append([cell])
    url = tmp_path_factory.mktemp("sheets") / "x.xlsx"
    sheet.save(url)
    assert [row["text"] for row in rows_of(str(url))] == texts


def test_messages_name_the_row_of_the_sheet(tmp_path: Path) -> None:
    rows = [["text", "label", "", None], ["a", "x"], [None, None], ["b", None], ["c", "y"]]
    url = book(tmp_path / "x.xlsx", rows)
    with input_url(url) as folder:
        train = read_all(choose(folder), folder)[1]["train"]
        assert [(row["text"], row["label_keys"]) for row in train.rows] == [("a", ["x"]), ("c", ["y"])]
        assert [reject.reason for reject in train.rejects] == [Reason.NO_LABELS]
    with pytest.raises(InputError, match=r"x\.xlsx, row 4: the point has no label"), input_url(url) as folder:
        raise InputError(str(read_all(choose(folder), folder)[1]["train"].rejects[0]))
    with input_url(url) as folder:
        (texts,) = Texts(folder).batches(9, False)
        assert texts["text"].to_pylist() == ["a", "b", "c"]


def test_what_is_no_sheet_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = Path(book(tmp_path / "good.xlsx", [["text"], ["a"]])).read_bytes()
    (tmp_path / "bad.xlsx").write_bytes(good[: len(good) // 2])
    (tmp_path / "text.xlsx").write_text("text,label\n")
    with zipfile.ZipFile(tmp_path / "bomb.xlsx", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("xl/workbook.xml", bytes(3 << 20))
    monkeypatch.setattr(base, "UNSUSPECTED", 1 << 20)
    book(tmp_path / "twice.xlsx", [["text", "text"], ["a", "b"]])
    book(tmp_path / "wide.xlsx", [["text"], ["a", "b"]])
    book(tmp_path / "empty.xlsx", [])
    for name, said in (
        ("bad", "not an .xlsx file with a header, or damaged"),
        ("text", "not an .xlsx file with a header, or damaged"),
        ("bomb", "unpacks to an unusual size"),
        ("twice", "two columns are called 'text'"),
        ("wide", "row 2: a cell beside the 1 columns"),
        ("empty", "not an .xlsx file with a header"),
        ("none", "file not found"),
    ):
        with pytest.raises(InputError, match=said) as caught, input_url(tmp_path / f"{name}.xlsx"):
            pass
        assert f"{name}.xlsx" in str(caught.value)
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(InputError, match=r"needs openpyxl\. Install the extra `xlsx`"), input_url("x.xlsx"):
        pass
