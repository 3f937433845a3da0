"""Every input form through the whole pipeline: the tables hold the data set that was written, whatever its form."""

import functools
import gzip
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipelines.shard import ShardOptions, shard
from schemas import storage
from schemas.errors import InputError
from schemas.manifest import open_manifest
from schemas.table import Table
from tests.pipelines.formats.forms import write
from tests.pipelines.raw import contents, rows_of

Points = dict[str, list[dict[str, Any]]]
LABELS, FEATURES = 11, 40
NAMES = [f"l{label * 7 % LABELS}" for label in range(LABELS)]  # keys in another order than ids


def make(rows: int = 60) -> Points:
    """Points by split; the last label has none."""
    generator = np.random.default_rng(5)
    points: Points = {}
    for split, count in (("train", rows), ("test", rows // 3)):
        points[split] = []
        for row in range(count):
            labels = sorted(set(generator.integers(0, LABELS - 1, 3).tolist()))
            ids = sorted(set(generator.integers(0, FEATURES, row % 6).tolist()))
            values = [float(value) for value in generator.integers(-8, 9, len(ids)) / 4]
            text = f"{split} point {row} " + "sea " * (row % 4)
            key = f"{split}-{row}"
            points[split].append({"key": key, "text": text.strip(), "labels": labels, "ids": ids, "values": values})
    return points


POINTS = make()
SHORT = {"train": "trn", "test": "tst"}


def jsonl(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def matrix_text(rows: list[list[tuple[int, float]]], columns: int) -> str:
    lines = [" ".join(f"{index}:{value}" for index, value in row) for row in rows]
    return "\n".join([f"{len(rows)} {columns}", *lines, ""])


def matrix_npz(rows: list[list[tuple[int, float]]], columns: int) -> bytes:
    flat = [entry for row in rows for entry in row]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    parts = np.array([v for _, v in flat]), np.array([i for i, _ in flat]), indptr
    out = io.BytesIO()
    scipy.sparse.save_npz(out, scipy.sparse.csr_matrix(parts, shape=(len(rows), columns)))
    return out.getvalue()


def of_labels(points: list[dict[str, Any]]) -> list[list[tuple[int, float]]]:
    return [[(label, 1.0) for label in point["labels"]] for point in points]


def of_features(points: list[dict[str, Any]]) -> list[list[tuple[int, float]]]:
    return [list(zip(point["ids"], point["values"], strict=True)) for point in points]


def keyed(point: dict[str, Any]) -> dict[str, Any]:
    return {"key": point["key"], "text": point["text"], "labels": [NAMES[label] for label in point["labels"]]}


LABEL_RECORDS = [{"key": name, "text": f"text of {name}"} for name in NAMES]


def write_xc(folder: Path) -> None:
    for split, points in POINTS.items():
        records = [{"uid": p["key"], "title": p["text"], "target_ind": p["labels"]} for p in points]
        write(folder, {f"{SHORT[split]}.json.gz": gzip.compress(jsonl(records))})
    write(folder, {"lbl.json.gz": gzip.compress(jsonl([{"uid": r["key"], "title": r["text"]} for r in LABEL_RECORDS]))})


def write_xc_sparse(folder: Path) -> None:
    for split, points in POINTS.items():
        write(folder, {f"{SHORT[split]}_X_Y.txt": matrix_text(of_labels(points), LABELS)})
        write(folder, {f"{SHORT[split]}_X_Xf.txt": matrix_text(of_features(points), FEATURES)})
    write(folder, {"lbl_X_Xf.txt": matrix_text([[(label, 1.0)] for label in range(LABELS)], FEATURES)})


def write_xc_sparse_and_text(folder: Path) -> None:
    write_xc_sparse(folder)
    for split, points in POINTS.items():
        write(folder, {f"raw/{SHORT[split]}_X.txt": "".join(point["text"] + "\n" for point in points)})
    write(folder, {"raw/Y.txt": "".join(record["text"] + "\n" for record in LABEL_RECORDS)})


def write_xc_single(folder: Path) -> None:
    for split, points in POINTS.items():
        lines = [f"{len(points)} {FEATURES} {LABELS}"]
        for point in points:
            fields = [",".join(map(str, point["labels"]))]
            lines.append(" ".join(fields + [f"{i}:{v}" for i, v in zip(point["ids"], point["values"], strict=True)]))
        write(folder, {f"{split}.txt": "\n".join([*lines, ""])})


def write_xc_text(folder: Path) -> None:
    for split, points in POINTS.items():
        write(folder, {f"{SHORT[split]}_X.txt.gz": gzip.compress("".join(p["text"] + "\n" for p in points).encode())})
        write(folder, {f"Y.{SHORT[split]}.npz": matrix_npz(of_labels(points), LABELS)})
    write(folder, {"Y.txt": "".join(record["text"] + "\n" for record in LABEL_RECORDS)})


def write_jsonl(folder: Path) -> None:
    for split, points in POINTS.items():
        write(folder, {f"{split}-{half}.jsonl": jsonl([keyed(p) for p in points[half::2]]) for half in (0, 1)})
    write(folder, {"labels.jsonl": jsonl(LABEL_RECORDS)})


def write_parquet(folder: Path) -> None:
    for split, points in POINTS.items():
        out = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([keyed(point) for point in points]), out, row_group_size=7)
        write(folder, {f"{split}.parquet": out.getvalue()})
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(LABEL_RECORDS), out)
    write(folder, {"labels.parquet": out.getvalue()})


def write_pairs(folder: Path) -> None:
    for split, points in POINTS.items():
        pairs = [(point["key"], NAMES[label]) for point in points for label in point["labels"]]
        write(folder, {f"pairs_{split}.tsv": "".join(f"{query}\t{label}\n" for query, label in pairs)})
        write(folder, {f"{split}.jsonl": jsonl([{"key": p["key"], "text": p["text"]} for p in points])})
    write(folder, {"labels.jsonl": jsonl(LABEL_RECORDS)})


def write_beir(folder: Path) -> None:
    records = [{"_id": point["key"], "text": point["text"]} for points in POINTS.values() for point in points]
    corpus = [{"_id": record["key"], "title": "", "text": record["text"]} for record in LABEL_RECORDS]
    write(folder, {"queries.jsonl": jsonl(records), "corpus.jsonl": jsonl(corpus)})
    for split, points in POINTS.items():
        lines = ["query-id\tcorpus-id\tscore\n"]
        for point in points:
            lines += [f"{point['key']}\t{NAMES[label]}\t1\n" for label in point["labels"]]
            lines.append(f"{point['key']}\t{NAMES[-1]}\t0\n")
        write(folder, {f"qrels/{split}.tsv": "".join(lines)})


# writer, its form, whether points have texts and features, whether labels have texts, whether rows have keys
FORMS: dict[str, tuple[Callable[[Path], None], str, bool, bool, bool, bool]] = {
    "xc": (write_xc, "xc", True, False, True, True),
    "xc-sparse": (write_xc_sparse, "xc-sparse", False, True, False, False),
    "xc-sparse and text": (write_xc_sparse_and_text, "xc-sparse", True, True, True, False),
    "xc-single": (write_xc_single, "xc-single", False, True, False, False),
    "xc-text": (write_xc_text, "xc-text", True, False, True, False),
    "jsonl": (write_jsonl, "jsonl", True, False, True, True),
    "parquet": (write_parquet, "parquet", True, False, True, True),
    "pairs": (write_pairs, "jsonl", True, False, True, True),
    "beir": (write_beir, "beir", True, False, True, True),
}


@pytest.fixture(scope="module")
def make_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the data set made from the form called so; each is made once."""

    @functools.cache
    def sharded(name: str) -> Path:
        folder = tmp_path_factory.mktemp("forms")
        writer, _, texts, *_ = FORMS[name]
        writer(folder / "raw")
        options = ShardOptions(tokenizer="train:300", shards=2, row_group_rows=8, keep_text=texts)
        shard(str(folder / "raw"), str(folder / "data"), options)
        return folder / "data"

    return sharded


@pytest.mark.parametrize("name", FORMS)
def test_tables_hold_what_was_written(make_once: Callable[[str], Path], name: str) -> None:
    _, form, texts, features, label_texts, keys = FORMS[name]
    data = str(make_once(name))
    manifest = open_manifest(data, "data")
    assert manifest.parameters["format"] == form
    assert manifest.parameters["labels"] == LABELS
    assert manifest.parameters["features"] == (FEATURES if features else None)
    labels = rows_of(f"{data}/labels")
    assert [row["label_id"] for row in labels] == list(range(LABELS))
    ids = {row["key"]: row["label_id"] for row in labels}  # of a name, or of a line as #line
    wanted = {label: ids[NAMES[label] if keys else f"#{label}"] for label in range(LABELS)}
    assert sorted(wanted.values()) == list(range(LABELS))
    texts_of = {row["label_id"]: row["text"] for row in labels}
    assert texts_of == {wanted[label]: f"text of {NAMES[label]}" if label_texts else "" for label in range(LABELS)}
    for split, points in POINTS.items():
        rows = {row["key"]: row for row in rows_of(f"{data}/queries/{split}")}
        assert len(rows) == len(points)
        for number, point in enumerate(points):
            row = rows[point["key"] if keys else f"#{number}"]
            assert row["label_ids"] == sorted(wanted[label] for label in point["labels"])
            if texts:
                tokens = Tokenizer.from_file(f"{data}/tokenizer/tokenizer.json")
                assert (row["text"], row["input_ids"]) == (point["text"], tokens.encode(point["text"]).ids)
            else:
                assert "input_ids" not in row
            if features:
                assert (row["feature_ids"], row["feature_values"]) == (point["ids"], point["values"])
            else:
                assert "feature_ids" not in row
    counts = Counter(wanted[label] for point in POINTS["train"] for label in point["labels"])
    assert [row["frequency"] for row in labels] == [counts[label] for label in range(LABELS)]


@pytest.mark.parametrize(("first", "second"), [("jsonl", "pairs"), ("jsonl", "parquet")])
def test_one_data_set_in_two_forms_gives_the_same_shards(
    make_once: Callable[[str], Path], first: str, second: str
) -> None:
    made = [contents(make_once(name)) for name in (first, second)]
    shard_bytes = [{k: v for k, v in files.items() if not k.endswith("_manifest.json")} for files in made]
    assert shard_bytes[0] == shard_bytes[1]


BROKEN = {"xc-single": "train.txt", "jsonl": "train-0.jsonl", "beir": "qrels/train.tsv"}


@pytest.mark.parametrize("name", BROKEN)
def test_too_many_bad_lines_publish_nothing(tmp_path: Path, name: str) -> None:
    file = BROKEN[name]
    FORMS[name][0](tmp_path / "raw")
    place = tmp_path / "raw" / file
    lines = place.read_bytes().splitlines(keepends=True)
    lines[5] = b"oops\n"
    place.write_bytes(b"".join(lines))
    raw, data = str(tmp_path / "raw"), tmp_path / "data"
    with pytest.raises(InputError, match=rf"rejected 1 of (?s:.*){file}, line 6: .*oops") as caught:
        shard(raw, str(data), ShardOptions(tokenizer="train:300", shards=2))
    assert "max_reject_share" in str(caught.value)
    assert not data.exists() or contents(data) == {}
    if name == "jsonl":
        shard(raw, str(data), ShardOptions(tokenizer="train:300", shards=2, max_reject_share=0.1))
        rejects = rows_of(str(data / "rejects"))
        assert [(row["source"], row["line"], row["reason"]) for row in rejects] == [(file, 6, "not_json")]


def test_features_are_counted_where_no_header_states_them(tmp_path: Path) -> None:
    points = [{"key": "a", "labels": ["x"], "feature_ids": [3, 17]}, {"key": "b", "labels": ["x"], "feature_ids": []}]
    labels = [{"key": "x", "text": "", "feature_ids": [20]}]
    write(tmp_path / "raw", {"train.jsonl": jsonl(points), "labels.jsonl": jsonl(labels)})
    manifest = shard(str(tmp_path / "raw"), str(tmp_path / "data"), ShardOptions(shards=1))
    assert manifest.parameters["features"] == 21
    rows = rows_of(str(tmp_path / "data" / "queries" / "train"))
    assert sorted(row["feature_ids"] for row in rows) == [[], [3, 17]]


HOSTILE = st.binary(max_size=60) | st.text('0123456789:., \n-e{}"', max_size=60).map(str.encode)


@settings(deadline=None, max_examples=6)
@given(st.lists(HOSTILE, min_size=2, max_size=2), st.sampled_from(["xc-sparse", "xc-single", "jsonl"]))
def test_hostile_bytes_publish_nothing_or_a_whole_data_set(hostile: list[bytes], form: str) -> None:
    root = "memory://hostile"
    storage.remove(root, recursive=True)
    names = {"xc-sparse": ("trn_X_Y.txt", "trn_X_Xf.txt"), "xc-single": ("train.txt", "test.txt")}
    heads = {"xc-sparse": b"2 9\n", "xc-single": b"2 9 9\n"}
    for name, content in zip(names.get(form, ("train.jsonl", "labels.jsonl")), hostile, strict=True):
        storage.write_bytes(f"{root}/raw/{name}", heads.get(form, b"") + content)
    try:
        shard(f"{root}/raw", f"{root}/data", ShardOptions(tokenizer="train:300", shards=2))
    except InputError:
        assert storage.list_names(f"{root}/data") == []
        return
    for name, digest in open_manifest(f"{root}/data").parents.items():
        assert open_manifest(f"{root}/data/{name}").digest == digest
        Table.open(f"{root}/data/{name}").verify()
