"""Files of text that other programs wrote: their encodings, separators, and cells that are no formulas."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import formats
from pipelines.formats import base
from pipelines.formats.from_columns import NO_SEPARATOR, SEPARATORS, read_csv, separator
from pipelines.formats.keyed import Texts
from pipelines.options import ShardOptions
from pipelines.shard import shard
from schemas import storage
from schemas.errors import InputError
from schemas.options import check
from schemas.table import Table
from scoring.prediction_files import plain_cell
from tests.pipelines.formats.forms import read_all

WESTERN = st.text(st.characters(codec="cp1252", exclude_characters="\r\n\ufeff\0"), max_size=20)
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252", "utf-32"]


@settings(deadline=None, max_examples=60)
@given(st.lists(WESTERN, min_size=1, max_size=9), st.sampled_from(ENCODINGS), st.integers(1, 50), st.booleans())
def test_lines_are_the_same_in_every_encoding(lines: list[str], name: str, chunk: int, stated: bool) -> None:
    lines[-1] += "."  # a file that ends in an empty line has no such line
    url = "memory://encodings/lines.txt.gz"
    storage.write_bytes(url, gzip.compress("\r\n".join(lines).encode(name)))
    stated |= name in ("utf-16-le", "utf-16-be", "cp1252", "utf-32")  # without a mark that is read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_CHUNK", chunk)
        blocks = list(base.LineBlocks(url, 4, encoding=name if stated else None))
    assert [line.decode() for block in blocks for line in block["line"].to_pylist()] == lines


PRICES = 'Text;Preis, EUR;label\r\n"Schraube, „verzinkt“; M4 – 100 St.";1,50 €;Eisen\r\nDübel | grau;2,–;Plastik\r\n'


@pytest.mark.parametrize("name", ["cp1252", "utf-16", "utf-8-sig"])
@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_an_export_of_a_spreadsheet_is_read(name: str, suffix: str, tmp_path: Path) -> None:
    body = PRICES.encode(name)
    (tmp_path / f"x.{suffix}").write_bytes(gzip.compress(body) if suffix.endswith("gz") else body)
    source = str(tmp_path / f"x.{suffix}")
    stated = name if name == "cp1252" else None
    (rows,) = Texts(source, fields=base.parse_fields("text=Text"), encoding=stated).batches(9, False)
    assert rows["text"].to_pylist() == ["Schraube, „verzinkt“; M4 – 100 St.", "Dübel | grau"]
    form = formats.choose(source, fields="text=Text", encoding=stated)
    train = read_all(form, source)[1]["train"]
    assert [row["label_keys"] for row in train.rows] == [["Eisen"], ["Plastik"]]


def test_unicode_text_of_excel_is_read_as_csv(tmp_path: Path) -> None:
    pd.DataFrame({"text": ['a "ship"\tat sea', "b\nc"], "label": ["x, y", "z"]}).to_csv(
        tmp_path / "x.csv", sep="\t", encoding="utf-16", index=False
    )
    train = read_all("csv", tmp_path / "x.csv")[1]["train"]
    assert [(row["text"], row["label_keys"]) for row in train.rows] == [('a "ship"\tat sea', ["x, y"]), ("b\nc", ["z"])]


@pytest.mark.parametrize("name", ["x.csv", "x.txt", "x.jsonl", "x.tsv"])
def test_a_message_names_the_likely_encoding(name: str, tmp_path: Path) -> None:
    lines = {"x.jsonl": '{"text": "plain"}\n{"text": "a café – 5 €"}\n'}.get(name, "text\nplain\na café – 5 €\n")
    (tmp_path / name).write_bytes(lines.encode("cp1252"))
    with pytest.raises(InputError, match=rf"{name}, line \d: .*a café – 5 €.*give encoding=.cp1252") as caught:
        list(Texts(str(tmp_path / name)).batches(9, False))
    assert "\n" not in str(caught.value)
    read = [row for rows in Texts(str(tmp_path / name), encoding="cp1252").batches(9, False) for row in rows["text"]]
    assert str(read[-1]) == "a café – 5 €"


@pytest.mark.parametrize(("text", "name"), [("Привет, мир", "cp1251"), ("こんにちは", "shift_jis"), ("你好", "gbk")])
def test_no_encoding_is_named_that_cannot_be(text: str, name: str) -> None:
    said = base.not_utf8(text.encode(name))
    assert ("encoding" in said, "cp1252" in said) == (True, False)


def test_an_encoding_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("abc\ne\x81".encode("latin-1"))
    with pytest.raises(InputError, match=r"x\.txt: not text in cp1252, within the first 6 bytes .*another encoding"):
        list(Texts(str(tmp_path / "x.txt"), encoding="cp1252").batches(9, False))
    for name in ("cp12520", "hex", "undefined", "a\0b"):
        with pytest.raises(InputError, match="encoding: expected an encoding, such as cp1252"):
            check(ShardOptions, {"encoding": name})
    (tmp_path / "trn.json.gz").write_bytes(b"")
    with pytest.raises(InputError, match="encoding works only with formats that have named fields"):
        formats.choose(str(tmp_path), "xc", encoding="cp1252")


# Cells with all separators, in files that the csv module writes with any of them.

CELLS = st.text("ab ,;|\t\"\n=-+@'", max_size=8)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(CELLS, min_size=3, max_size=3), min_size=2, max_size=12),
    st.sampled_from(SEPARATORS),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    st.sampled_from(["\r\n", "\n"]),
    st.booleans(),
)
def test_what_is_written_as_text_is_read_back(
    rows: list[list[str]], mark: str, quoting: Any, end: str, ended: bool
) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=mark, quoting=quoting, lineterminator=end)
    writer.writerows([["text", "price", "label"], *([plain_cell(cell) for cell in row] for row in rows)])
    url = "memory://encodings/cells.csv"
    storage.write_bytes(url, out.getvalue().removesuffix("" if ended else end).encode())
    blocks = list(read_csv(url, 5))
    read = [[*row.values()][:3] for block in blocks for row in block.to_pylist() if row["\x01fields"]]
    assert read == [row for row in rows if any(row)]


@settings(max_examples=300)
@given(st.text("'=+-@\t\r\n5.,a", max_size=5))
def test_no_written_cell_is_a_formula(text: str) -> None:
    written = plain_cell(text)
    is_number = text[:1] == "-" and text[1:].replace(",", ".").replace(".", "").isdigit() and text[-1:].isdigit()
    assert not written.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) or is_number
    assert written in (text, f"'{text}")


@pytest.mark.parametrize(
    ("lines", "mark"),
    [
        (["text,label\n", "a;b;c,x\n", "d;e;f,y\n"], ","),
        (["Name, kurz;Preis, netto;Art\n", "M4;1,50;Eisen\n", "M5;1,70;Eisen\n"], ";"),
        (["Text;Preis, EUR\n", "x;1,5\n", "y;2,5\n"], ";"),
        (['"text; and more",label\n', "a,b\n"], ","),
        (["text|labels\n", "a, b; c|x;y\n"], "|"),
        (["id\ttext\tlabel\n", "1\ta, b, c\tx\n"], "\t"),
        (["text\n", "hello, world\n", "a; b\n"], NO_SEPARATOR),
        (["text,label\n"], ","),
        ([""], NO_SEPARATOR),
    ],
)
def test_the_separator_is_found(lines: list[str], mark: str) -> None:
    assert separator(lines) == mark


# Rows without labels.


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_rows_without_labels_are_skipped_where_asked(suffix: str, tmp_path: Path) -> None:
    rows = [{"text": f"text {n % 7}", "label": "" if n % 4 == 0 else f"label {n % 3}"} for n in range(40)]
    lines = ["text,label", *(",".join(row.values()) for row in rows)] if suffix == "csv" else map(json.dumps, rows)
    source = tmp_path / f"x.{suffix}"
    source.write_text("\n".join(lines))
    options = ShardOptions(tokenizer="train:300", shards=2)
    with pytest.raises(InputError, match=r"rejected 10 of 40 rows .*10 no_labels(.|\n)*unlabelled=.skip"):
        shard(str(source), str(tmp_path / "data"), options)
    data = shard(str(source), str(tmp_path / "data"), options.model_copy(update={"unlabelled": "skip"}))
    assert data.parameters["rows"]["train"] == len({row["text"] for row in rows if row["label"]})
    rejects = Table.open(str(tmp_path / "data" / "rejects"), "rejects").read().to_pylist()
    assert [row["line"] for row in rejects] == [n + 1 + (suffix == "csv") for n in range(0, 40, 4)]
