"""Inputs that people have, through the whole of `shard`: files, objects, cut splits; and what it says of them."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import extremis
from pipelines.formats.base import text_key
from schemas.errors import InputError
from tests.command import call

PAIRS = [(f"a picture of {a} and {b} number {n}", label) for n, (a, b) in enumerate(
    [("sea", "ship"), ("cat", "dog"), ("hill", "river")] * 40) for label in (a, b)]  # fmt: skip
QUICK: dict[str, Any] = {"tokenizer": "train:300", "progress": False}


def counts(result: extremis.Result) -> tuple[dict[str, int], int]:
    return dict(result.rows), result.labels


@pytest.fixture(scope="module")
def of_file(tmp_path_factory: pytest.TempPathFactory) -> extremis.Result:
    folder = tmp_path_factory.mktemp("pairs")
    with (folder / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *PAIRS])
    return extremis.shard(folder / "pairs.csv", folder / "data", test=0.2, **QUICK)


def test_a_file_of_pairs_becomes_points_with_all_of_their_labels(of_file: extremis.Result) -> None:
    rows, labels = counts(of_file)
    assert labels == 6
    assert sum(rows.values()) == 120
    assert 10 < rows["test"] < 40
    assert of_file.summary["splits"]["test"]["in_train"] == 0


@pytest.mark.parametrize("kind", ["pairs", "rows", "arrow", "splits"])
def test_objects_are_read_as_the_file_is(kind: str, of_file: extremis.Result, tmp_path: Path) -> None:
    rows = [{"text": text, "label": label} for text, label in PAIRS]
    inputs = {"pairs": PAIRS, "rows": rows, "arrow": pa.Table.from_pylist(rows), "splits": {"train": rows}}
    made = extremis.shard(inputs[kind], tmp_path / "data", test=0.2, **QUICK)
    assert counts(made) == counts(of_file)
    assert made.tables["queries/train"] == of_file.tables["queries/train"]


def test_a_table_of_labels_beside_has_texts_and_labels_without_points(tmp_path: Path) -> None:
    labels = [{"key": key, "text": f"the {key}"} for key in ("sea", "ship", "cat", "dog", "hill", "river", "moon")]
    points = [{"key": f"k{n}", "text": text, "labels": [label]} for n, (text, label) in enumerate(PAIRS)]
    made = extremis.shard({"train": points[:200], "test": points[150:], "labels": labels}, tmp_path / "data", **QUICK)
    assert made.labels == 7
    assert made.summary["labels"]["without_training_points"] == 1
    # Each text is two rows with keys of their own: those from 150 on are in train, too, up to 200.
    assert made.summary["splits"]["test"]["in_train"] == 50


def test_what_no_input_is_is_said(tmp_path: Path) -> None:
    for wrong, words in ((3, "got int"), ([1, 2], "rows as dictionaries"), ({"trian": PAIRS}, "got trian")):
        with pytest.raises(InputError, match=words):
            extremis.shard(wrong, tmp_path / "data", **QUICK)
    (tmp_path / "x.ods").write_bytes(b"PK")
    with pytest.raises(InputError, match="one file with an unknown extension"):
        extremis.shard(tmp_path / "x.ods", tmp_path / "data", **QUICK)


def test_the_command_says_what_is_in_the_data_and_what_to_do_next(tmp_path: Path) -> None:
    lines = ["text,label", "one two,a", "one two,b", ",c", ",", ",,,", "three,a,x"]  # a spreadsheet has empty rows
    (tmp_path / "train.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "test.csv").write_text("text,label\none two,a\nfour,a\n")
    done = call("shard", tmp_path, tmp_path / "data", "--tokenizer", "train:100", "--max-reject-share", "0.5", "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["summary"]["splits"]["train"]["merged"] == 1
    assert "train: 2 points, 1.5 labels each, 1 rows merged" in done.err
    assert "1 with an empty text (kept)" in done.err
    assert "test: 2 points, 1.0 labels each, 1 with a text that is also in train" in done.err
    assert f"rejected from train: 1 malformed; see {tmp_path / 'data' / 'rejects'}" in done.err
    (tmp_path / "day.csv").write_text("text,label\nfive,a\nsix\n")
    made = extremis.shard(
        tmp_path / "day.csv", tmp_path / "day", onto=tmp_path / "data", max_reject_share=0.5, progress=False
    )
    assert made.summary["rejected"] == {"queries/train": {"malformed": 1}}
    assert f"next: extremis run auto {tmp_path / 'data'} RUN" in done.err
    refused = call("shard", tmp_path, tmp_path / "other", "--test", "0.2")
    assert refused.status == 2
    assert "is already a test split" in refused.err


def sharded(folder: Path, *options: str, **files: str) -> str:
    """Write files whose names end after `__`, shard them, and return what is said."""
    (folder / "raw").mkdir()
    for name, content in files.items():
        (folder / "raw" / name.replace("__", ".")).write_text(content)
    return call("shard", folder / "raw", folder / "data", "--tokenizer", "train:100", *options).err


def test_a_summary_begins_with_the_labels_and_says_each_reject_once(tmp_path: Path) -> None:
    rows = "".join(f"one {n},{'ab'[n % 2]}\n" for n in range(40))
    points = f"text,label\n{rows}x,y,z\n"
    options = ("--max-reject-share", "0.5", "--test", "0.3", "--validation", "0.2")
    said = sharded(tmp_path, *options, train__csv=points, labels__csv="key,text\na,a\nb,b\nmoon,moon\n")
    lines = said.partition("published\n")[2].splitlines()
    assert lines[0] == "labels: 3, 1 without a training point"
    assert [line.partition(":")[0] for line in lines[1:4]] == ["train", "test", "val"]
    assert [line for line in lines if "reject" in line] == [
        f"rejected from train: 1 malformed; see {tmp_path / 'data' / 'rejects'}"
    ]
    assert said.count("malformed") == 1


FIRST = [
    (
        {"train__csv": 'id,title,label\n\n7,"a ship\x1b[31m,\nat sea",sea\n8,b,c\n'},
        ("--fields", "key=id,text=title"),
        [r'first row of train: key "7", text "a ship\x1b[31m, at sea", labels "sea"'],
    ),
    (
        {"train__csv": f'text,labels\n"{"long " * 99}",{"|".join("abcdefg")}\n'},
        (),
        [
            f'first row of train: key "{text_key("long " * 99)}", text "{("long " * 24)}…", '
            'labels "a", "b", "c", "d", "e" … (7)'
        ],
    ),
    (
        {
            "queries__jsonl": '{"key": "q", "text": ""}\n',
            "pairs_train__tsv": "query_key\tlabel_key\nq\tsea\n",
            "labels__jsonl": '{"key": "sea", "text": "the sea"}\n',
        },
        (),
        [
            'first row of train: key "q", text ""',
            'first row of pairs/train: key "q", labels "sea"',
            'first row of labels: key "sea", text "the sea"',
        ],
    ),
    (
        {"trn_X_Y__txt": "1 3\n0:1 2:1\n", "trn_X_Xf__txt": "1 9999\n17:0.31 4096:1\n"},
        (),
        ['first row of train: key "#0", features 17:0.31, 4096:1, labels 0, 2'],
    ),
]


@pytest.mark.parametrize(("files", "options", "expected"), FIRST, ids=["csv", "long", "pairs", "sparse"])
def test_the_first_row_is_shown_as_it_was_understood(
    files: dict[str, str], options: tuple[str, ...], expected: list[str], tmp_path: Path
) -> None:
    said = sharded(tmp_path, *options, **files)
    assert [line for line in said.splitlines() if line.startswith("first row")] == expected, said


ROWS = {
    "csv": ({"train__csv": "text,label\n\na,b\nc,d\n\nx,y,z\n"}, "1 of 3 rows of train.csv"),
    "lines": ({"train__jsonl": '\n{"key": "a", "text": "b", "labels": ["sea"]}\n\n{}\n'}, "1 of 2 rows of train.jsonl"),
    "pairs": (
        {
            "queries__jsonl": '{"key": "q", "text": "b"}\n',
            "pairs_train__tsv": "query_key\tlabel_key\tscore\nq\tsea\t1\nq\tsea\t0\n\nq\n",
        },
        "1 of 3 rows of pairs_train.tsv",
    ),
}


@pytest.mark.parametrize("form", ROWS)
def test_neither_a_header_nor_a_blank_line_is_a_row(form: str, tmp_path: Path) -> None:
    files, counted = ROWS[form]
    labels = {} if form == "csv" else {"labels__jsonl": '{"key": "sea", "text": "the sea"}\n'}
    assert f"error: rejected {counted} (" in sharded(tmp_path, **files, **labels)


COUNTED = re.compile(r"(?<![\w.,])(\d(?:[\d,]*\d)?) labels\b(?! each| with a new text)|labels: (\d+)")
LABELS = {
    # Six labels of points, of which the files name some twice: `gone` has only a test point, `moon` has none.
    "csv": {"train__csv": "text,label\n{}", "test__csv": "text,label\na test,gone\nanother,c0\n"},
    "lists": {"train__csv": "text,labels\n{}", "test__csv": "text,labels\na test,gone|c0\n"},
    "with labels": {"train__csv": "text,label\n{}", "labels__csv": "key,text\nmoon,the moon\ngone,g\n{labels}"},
    "pairs": {
        "queries__jsonl": "".join(json.dumps({"key": f"q{n}", "text": f"one {n}"}) + "\n" for n in range(12)),
        "pairs_train__tsv": "query_key\tlabel_key\n" + "".join(f"q{n}\tc{n % 5}\n" for n in range(12)),
        "labels__jsonl": "".join(json.dumps({"key": f"c{n}", "text": f"l {n}"}) + "\n" for n in range(7)),
    },
}


@pytest.mark.parametrize("form", LABELS)
def test_one_number_of_labels_is_said(form: str, tmp_path: Path) -> None:
    rows = "".join(f"one {n},c{n % 5}\n" for n in range(12))
    labels = "".join(f"c{n},label {n}\n" for n in range(5))
    files = {name: text.replace("{}", rows).replace("{labels}", labels) for name, text in LABELS[form].items()}
    said = sharded(tmp_path, **files)
    held = extremis.inspect(tmp_path / "data", rows=0, progress=False).to_json()["tables"]["labels"]["rows"]
    assert COUNTED.findall(said) == [("", str(held))], said
    (tmp_path / "more.csv").write_text("text,label\nmore,c0\nnew,new\n")
    said = call("shard", tmp_path / "more.csv", tmp_path / "data2", "--onto", tmp_path / "data", "--part", "2").err
    assert COUNTED.findall(said) == [("", str(held + 1))], said
