import contextlib
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats import choose
from pipelines.formats.base import Reason
from schemas import storage
from schemas.errors import InputError
from tests.pipelines.formats.forms import read_all, write

HEADER = "query-id\tcorpus-id\tscore\n"
CORPUS = [
    {"_id": "d1", "title": "Title", "text": "of a document", "metadata": {}},
    {"_id": "d2", "title": "", "text": "no title"},
    {"_id": "3", "title": "no text", "text": ""},
]
QUERIES = [{"_id": "q1", "text": "one", "metadata": {}}, {"_id": "q2", "text": "two"}, {"_id": "q3", "text": "three"}]
FILES: dict[str, str | bytes] = {
    "corpus.jsonl": "".join(json.dumps(record) + "\n" for record in CORPUS),
    "queries.jsonl": "".join(json.dumps(record) + "\n" for record in QUERIES),
    "qrels/train.tsv": f"{HEADER}q1\td1\t1\nq1\td2\t0\nq1\t3\t2\nq2\td2\t-1\n",
    "qrels/dev.tsv": f"{HEADER}q2\td2\t1\n",
    "qrels/test.tsv": f"{HEADER}q3\td2\t1\n",
}


@pytest.mark.parametrize("block_rows", [1, 2, 100])
@pytest.mark.parametrize("packed", [False, True])
def test_golden(tmp_path: Path, block_rows: int, packed: bool) -> None:
    for name, content in FILES.items():
        assert isinstance(content, str)
        other = gzip.compress(b"\xef\xbb\xbf" + content.replace("\n", "\r\n").encode())
        write(tmp_path, {f"{name}.gz": other} if packed else {name: content})
    assert choose(str(tmp_path)).name == "beir"
    inputs, tables = read_all("beir", tmp_path, block_rows)
    assert (inputs.keyed, inputs.shared_points, inputs.splits) == (True, True, ("train", "val", "test"))
    for split in inputs.splits:
        texts = ["one", "two", "three"]
        expected = [{"row": i, "key": f"q{i + 1}", "text": texts[i], "merged": 0} for i in range(3)]
        assert tables[split].rows == expected
    assert tables["labels"].rows == [
        {"row": 0, "key": "d1", "text": "Title\nof a document"},
        {"row": 1, "key": "d2", "text": "no title"},
        {"row": 2, "key": "3", "text": "no text"},
    ]
    pairs = {split: [tuple(row.values())[1:] for row in tables[f"pairs/{split}"].rows] for split in inputs.splits}
    assert pairs == {"train": [("q1", "d1"), ("q1", "3")], "val": [("q2", "d2")], "test": [("q3", "d2")]}
    assert not any(table.rejects for table in tables.values())
    titles = read_all("beir", tmp_path, block_rows, text="title")[1]
    assert titles["labels"].column("text") == ["Title", "", "no text"]
    assert titles["train"].column("text") == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"corpus.jsonl": None},
            "no corpus.jsonl or .* here; found: .*Expected corpus.jsonl, queries.jsonl, qrels/train.tsv",
        ),
        ({"queries.jsonl": None}, "no queries.jsonl or .* here"),
        ({"qrels/train.tsv": None}, "no qrels/train.tsv or .* here"),
        ({"qrels/val.tsv": HEADER}, "both qrels/dev.tsv and qrels/val.tsv are here"),
        ({"qrels/train.tsv": ""}, "qrels/train.tsv: the file is empty"),
        ({"corpus.jsonl": None, "corpus.jsonl.gz": b"{}"}, "corpus.jsonl.gz: not a gzip file"),
    ],
)
def test_one_clear_error(tmp_path: Path, changes: dict[str, str | bytes | None], message: str) -> None:
    files = {name: content for name, content in {**FILES, **changes}.items() if content is not None}
    with pytest.raises(InputError, match=message) as caught:
        read_all("beir", write(tmp_path, files))
    assert "\n" not in str(caught.value)


def test_bad_rows_are_rejected_and_named(tmp_path: Path) -> None:
    changes = {
        "corpus.jsonl": '{"_id": "d1", "text": "t"}\n{"id": "d2", "text": "t"}\n{"_id": "d3"}\n',
        "qrels/train.tsv": f"{HEADER}q1\td1\t1\nq1 d1 1\nq1\td1\tone\n",
    }
    _, tables = read_all("beir", write(tmp_path, {**FILES, **changes}))
    assert [(r.file, r.line, r.reason) for r in tables["labels"].rejects] == [
        ("corpus.jsonl", 2, Reason.MISSING_FIELD),
        ("corpus.jsonl", 3, Reason.MISSING_FIELD),
    ]
    assert [(r.file, r.line, r.reason) for r in tables["pairs/train"].rejects] == [
        ("qrels/train.tsv", 3, Reason.MALFORMED),
        ("qrels/train.tsv", 4, Reason.MALFORMED),
    ]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.binary(max_size=30), min_size=3, max_size=3), st.integers(1, 4))
def test_hostile_bytes_are_an_input_error_or_rejects(contents: list[bytes], block: int) -> None:
    root = "memory://beir/hostile"
    for name, content in zip(("corpus.jsonl", "queries.jsonl", "qrels/train.tsv"), contents, strict=True):
        storage.write_bytes(f"{root}/{name}", content)
    with contextlib.suppress(InputError):
        read_all("beir", root, block)
