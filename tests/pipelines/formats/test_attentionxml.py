"""Files of AttentionXML: lines against the same rows as JSON, any block size; faults."""

import gzip
import json
from pathlib import Path

import pytest

from pipelines.formats import choose
from pipelines.formats.base import LABELS, Reason
from schemas.errors import InputError
from tests.pipelines.formats.forms import read_all, write

TEXTS = ["a ship, in a storm", "a boat", "a ship, in a storm", "ein Schiff – groß"]
NAMED = ["sea ships", "boats", " sea\tstorm  sea", "schiffe"]


@pytest.mark.parametrize("block", [1, 3, 8])
def test_lines_are_the_rows_of_json_lines(block: int, tmp_path: Path) -> None:
    plain, packed = ("\n".join(lines).encode() + b"\n" for lines in (TEXTS, NAMED))
    files = {"train_raw_texts.txt": plain, "train_texts.txt": b"tokens", "train_labels.txt.gz": gzip.compress(packed)}
    write(tmp_path, {**files, "test_texts.txt": plain, "test_labels.txt": packed})
    rows = [{"text": text, "labels": named.split()} for text, named in zip(TEXTS, NAMED, strict=True)]
    write(tmp_path, {"json/same.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    form = choose(str(tmp_path))
    assert form.name == "attentionxml"
    tables = read_all(form, tmp_path, block)[1]
    same = read_all(choose(f"{tmp_path}/json/same.jsonl"), f"{tmp_path}/json/same.jsonl", 8)[1]
    assert tables["train"].rows == tables["test"].rows == same["train"].rows
    assert {*tables[LABELS].column("key")} == {*same[LABELS].column("key")}


def test_faulty_lines_are_rejected_and_named(tmp_path: Path) -> None:
    write(tmp_path, {"train_texts.txt": b"one\ntwo\xff\nthree\nfour\n", "train_labels.txt": b"a\nb\n \nc\xff d\n"})
    tables = read_all(choose(str(tmp_path)), tmp_path)[1]
    assert tables["train"].column("text") == ["one"]
    found = [(reject.line, reject.reason) for reject in tables["train"].rejects]
    assert found == [(2, Reason.NOT_UNICODE), (3, Reason.NO_LABELS), (4, Reason.NOT_UNICODE)]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train_labels.txt": "a\n"}, "expected the same number of lines"),
        ({}, "no train_labels.txt"),
        ({"train_labels.txt": "a\nb\n", "test_labels.txt": "a\n"}, "no test_texts.txt"),
    ],
)
def test_a_missing_file_or_line_is_named(files: dict[str, str], message: str, tmp_path: Path) -> None:
    write(tmp_path, {"train_texts.txt": "one\ntwo\n", **files})
    with pytest.raises(InputError, match=message):
        read_all(choose(str(tmp_path)), tmp_path)
