"""Inputs that no data set can be made of: one message that names the file, and nothing at DATA."""

import bz2
import functools
import gzip
import io
import json
import lzma
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.formats import base, by_name, choose
from pipelines.options import FORMATS
from schemas.errors import InputError
from tests.command import ROOT, Done, environment
from tests.hostile.outcome import REMEDY, check, listing, run
from tests.pipelines.formats.forms import read_all, write

POINT = {"key": "q", "text": "t", "labels": ["a"]}
GOOD = json.dumps(POINT) + "\n"
LABELS = '{"key": "a", "text": "label"}\n'


def parquet(**columns: Any) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), out)
    return out.getvalue().to_pybytes()


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def zipped(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return out.getvalue()


def npy(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


XC = {
    "trn_X_Xf.txt": "1 2\n0:1\n",
    "trn_X_Y.txt": "1 2\n0:1\n",
    "tst_X_Xf.txt": "1 2\n0:1\n",
    "tst_X_Y.txt": "1 2\n0:1\n",
}
PARQUET = {"train.parquet": parquet(key=["q"], text=["t"], labels=[["a"]]), "labels.jsonl": LABELS}
CSR = {"format": np.array(b"csr"), "shape": np.array([1, 2]), "indptr": np.array([0, 1]), "indices": np.array([0])}
CSR["data"] = np.array([1.0])

# The files of a source: those of a good one, and what is wrong with them; None: a folder of that name.
SOURCES: dict[str, dict[str, str | bytes | None]] = {
    "nothing": {},
    "another file": {"readme.md": "hello"},
    "only labels": {"labels.jsonl": LABELS},
    "only points": {"train.jsonl": GOOD},
    "a folder named like points": {"train.jsonl": None, "labels.jsonl": LABELS},
    "a folder named like labels": {"train.jsonl": GOOD, "labels.jsonl": None},
    "a folder named like Parquet": {"train.parquet": None, "labels.jsonl": LABELS},
    "a folder named like XC": {"trn.json.gz": None, "lbl.json.gz": None, "tst.json.gz": None},
    "no lines": {"train.jsonl": "", "labels.jsonl": LABELS},
    "no labels in the file": {"train.jsonl": GOOD, "labels.jsonl": ""},
    "UTF-16": {"train.jsonl": GOOD.encode("utf-16")[:-1], "labels.jsonl": LABELS},
    "two of one name": {"train.jsonl": GOOD, "train.jsonl.gz": gzip.compress(GOOD.encode()), "labels.jsonl": LABELS},
    "two forms": {"train.jsonl": GOOD, "labels.jsonl": LABELS, "train.parquet": PARQUET["train.parquet"]},
    "not gzip": {"train.jsonl.gz": GOOD, "labels.jsonl": LABELS},
    "cut gzip": {"train.jsonl.gz": gzip.compress(GOOD.encode() * 99)[:-9], "labels.jsonl": LABELS},
    "gzip of nothing": {"train.jsonl.gz": gzip.compress(b""), "labels.jsonl": LABELS},
    "a gzip bomb in one line": {"train.jsonl.gz": gzip.compress(bytes(3 << 20)), "labels.jsonl": LABELS},
    "not bzip2": {"train.jsonl.bz2": GOOD, "labels.jsonl": LABELS},
    "cut bzip2": {"train.jsonl.bz2": bz2.compress(GOOD.encode())[:-9], "labels.jsonl": LABELS},
    "not xz": {"train.jsonl.xz": GOOD, "labels.jsonl": LABELS},
    "cut xz": {"train.jsonl.xz": lzma.compress(GOOD.encode())[:-9], "labels.jsonl": LABELS},
    "not zstd": {"train.jsonl.zst": GOOD, "labels.jsonl": LABELS},
    "a line of 3 MB": {"train.jsonl": b"x" * (3 << 20), "labels.jsonl": LABELS},
    "Parquet that is none": {"train.parquet": "x" * 100, "labels.jsonl": LABELS},
    "Parquet of nothing": {"train.parquet": b"", "labels.jsonl": LABELS},
    "Parquet with a footer of 4 GB": {"train.parquet": b"PAR1" + b"\xff" * 4 + b"PAR1", "labels.jsonl": LABELS},
    "Parquet that is cut": {"train.parquet": PARQUET["train.parquet"][:-30], "labels.jsonl": LABELS},
    "Parquet without keys": {"train.parquet": parquet(text=["t"], labels=[["a"]]), "labels.jsonl": LABELS},
    "Parquet without labels": {"train.parquet": parquet(key=["q"], text=["t"]), "labels.jsonl": LABELS},
    "Parquet without texts": {"train.parquet": parquet(key=["q"], labels=[["a"]]), "labels.jsonl": LABELS},
    "XC with another number of rows": {**XC, "trn_X_Y.txt": "2 2\n0:1\n0:1\n"},
    "XC with no header": {**XC, "trn_X_Y.txt": "0:1\n"},
    "XC with a header of text": {**XC, "trn_X_Y.txt": "one two\n0:1\n"},
    "XC with a header of 5,000 digits": {**XC, "trn_X_Y.txt": "1 " + "9" * 5000 + "\n0:1\n"},
    "XC with 10^15 labels": {
        **XC,
        "trn_X_Y.txt": "1 1000000000000000\n0:1\n",
        "tst_X_Y.txt": "1 1000000000000000\n0:1\n",
    },
    "XC with 10^15 features": {
        **XC,
        "trn_X_Xf.txt": "1 1000000000000000\n0:1\n",
        "tst_X_Xf.txt": "1 1000000000000000\n0:1\n",
    },
    "XC with 10^15 rows": {**XC, "trn_X_Xf.txt": f"{10**15} 2\n0:1\n", "trn_X_Y.txt": f"{10**15} 2\n0:1\n"},
    "CSV of a header": {"train.csv": "text,label\n"},
    "AttentionXML without labels": {"train_texts.txt": "t\n"},
    "AttentionXML with fewer labels": {"train_texts.txt": "t\nt\n", "train_labels.txt": "a\n"},
    "XC that is cut": {**XC, "trn_X_Xf.txt": "5000 2\n0:1\n", "trn_X_Y.txt": "5000 2\n0:1\n"},
}
ARRAYS: dict[str, bytes] = {
    "no zip": b"x" * 100,
    "nothing": b"",
    "an empty zip": zipped(),
    "no arrays": zipped(x=b""),
    "a member without header": zipped(format=b"x", shape=b"", indptr=b"", indices=b"", data=b""),
    "a pickle": npz(**{**CSR, "data": np.array([{}], dtype=object)}),
    "a shape of 2^62 rows": npz(**{**CSR, "shape": np.array([1 << 62, 2])}),
    "indptr of floats": npz(**{**CSR, "indptr": np.array([0.0, 1.0])}),
    "a header of code": zipped(
        format=npy("__import__('os').mkdir('bomb-went-off')"), shape=b"", indptr=b"", indices=b"", data=b""
    ),
    "a header of brackets": zipped(format=npy("(" * 900), shape=b"", indptr=b"", indices=b"", data=b""),
    "a header of 2^60 entries": zipped(
        **{name: npy(f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({1 << 60},)}}") for name in CSR}
    ),
    "a type of no bytes": zipped(
        **{name: npy("{'descr': '|V0', 'fortran_order': False, 'shape': (1,)}") for name in CSR}
    ),
    "cut": npz(**CSR)[:-50],
}
for number, content in ARRAYS.items():
    SOURCES[f"npz: {number}"] = {
        **{name: text for name, text in XC.items() if name != "trn_X_Xf.txt"},
        "trn_X_Xf.npz": content,
    }


def source(folder: Path, files: dict[str, str | bytes | None]) -> Path:
    folder.mkdir()
    write(folder, {name: content for name, content in files.items() if content is not None})
    for name, content in files.items():
        if content is None:
            (folder / name).mkdir()
    return folder


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_cannot_be(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_LINE_BYTES", 1 << 20)
    raw = source(tmp_path / "raw", SOURCES[name])
    run("shard", raw, tmp_path / "data", "--tokenizer", "train:300", words=("raw",))
    assert listing(tmp_path / "data") == []
    assert not Path("bomb-went-off").exists()


# A record's field and its value; the row is rejected with a reason and nothing else is.
RECORDS: dict[str, str] = {
    "no object": "[1]",
    "text": '"x"',
    "null": "null",
    "a number": "1e400",
    "cut": '{"key": "a"',
    "two objects": '{"key": "a"} {"key": "b"}',
    "no key": '{"text": "t", "labels": ["a"]}',
    "null for a key": '{"key": null, "text": "t", "labels": ["a"]}',
    "an empty key": '{"key": "", "text": "t", "labels": ["a"]}',
    "a key of 2^64": f'{{"key": {2**64}, "text": "t", "labels": ["a"]}}',
    "a key of 10^400": f'{{"key": {10**400}, "text": "t", "labels": ["a"]}}',
    "a key of 10^5000": '{"key": 1' + "0" * 5000 + ', "text": "t", "labels": ["a"]}',
    "a key of -2^64": f'{{"key": {-(2**64)}, "text": "t", "labels": ["a"]}}',
    "a fraction for a key": '{"key": 0.5, "text": "t", "labels": ["a"]}',
    "an infinite key": '{"key": Infinity, "text": "t", "labels": ["a"]}',
    "true for a key": '{"key": true, "text": "t", "labels": ["a"]}',
    "a list for a key": '{"key": [], "text": "t", "labels": ["a"]}',
    "half a surrogate pair in a key": '{"key": "\\ud800", "text": "t", "labels": ["a"]}',
    "no text": '{"key": "a", "labels": ["a"]}',
    "a number for a text": '{"key": "a", "text": 3, "labels": ["a"]}',
    "half a surrogate pair in a text": '{"key": "a", "text": "\\udfff", "labels": ["a"]}',
    "no labels": '{"key": "a", "text": "t"}',
    "no label": '{"key": "a", "text": "t", "labels": []}',
    "a number for labels": '{"key": "a", "text": "t", "labels": 5}',
    "text for labels that is an unclear list": '{"key": "a", "text": "t", "labels": "[1 2]"}',
    "null for a label": '{"key": "a", "text": "t", "labels": [null]}',
    "a label of 2^64": f'{{"key": "a", "text": "t", "labels": [{2**64}]}}',
    "a label of 10^400": f'{{"key": "a", "text": "t", "labels": [{10**400}]}}',
    "an empty label": '{"key": "a", "text": "t", "labels": [""]}',
    "an object for a label": '{"key": "a", "text": "t", "labels": [{}]}',
    "deep": "[" * 100_000,
    "deep labels": '{"key": "a", "text": "t", "labels": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "a NUL": "\0",
    "a negative feature": '{"key": "a", "text": "t", "labels": ["a"], "feature_ids": [-1]}',
    "a feature of 2^31": '{"key": "a", "text": "t", "labels": ["a"], "feature_ids": [2147483648]}',
    "a feature of 10^400": f'{{"key": "a", "text": "t", "labels": ["a"], "feature_ids": [{10**400}]}}',
    "a fraction for a feature": '{"key": "a", "text": "t", "labels": ["a"], "feature_ids": [0.5]}',
    "a value of NaN": '{"key": "a", "text": "t", "labels": ["a"], "feature_ids": [1], "feature_values": [NaN]}',
    "a value of infinity": '{"key": "a", "labels": ["a"], "feature_ids": [1], "feature_values": [1e999]}',
    "a value of 10^400": f'{{"key": "a", "labels": ["a"], "feature_ids": [1], "feature_values": [{10**400}]}}',
    "text for a value": '{"key": "a", "text": "t", "labels": ["a"], "feature_ids": [1], "feature_values": ["x"]}',
    "fewer values": '{"key": "a", "text": "t", "labels": ["a"], "feature_ids": [1, 2], "feature_values": [1]}',
    "an object for features": '{"key": "a", "text": "t", "labels": ["a"], "feature_ids": {"a": 1}}',
}


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_record_that_cannot_be(features: bool, first: bool, tmp_path: Path) -> None:
    """It is rejected by its line, the good one beside it is read with all that it has."""
    good = {**POINT, "feature_ids": [3], "feature_values": [0.5]} if features else POINT
    for name, record in RECORDS.items():
        if "feature" in name + record and not features:
            continue
        records = [record, json.dumps(good)] if first else [json.dumps(good), record]
        write(tmp_path, {"train.jsonl": "\n".join(records) + "\n", "labels.jsonl": LABELS})
        train = read_all("jsonl", tmp_path)[1]["train"]
        if not features or name != "no text":  # beside features a text may be missing
            assert [reject.line for reject in train.rejects] == [1 if first else 2], name
            assert train.rejects[0].detail
        kept = next(row for row in train.rows if row["key"] == "q")
        assert kept["text"] == "t", name
        assert not features or (kept["feature_ids"], kept["feature_values"]) == ([3], [0.5]), name


NAMES = st.sampled_from(
    [
        "train.jsonl",
        "train.jsonl.gz",
        "labels.jsonl",
        "train.parquet",
        "trn.json.gz",
        "lbl.json.gz",
        "trn_X_Y.txt",
        "trn_X_Xf.txt",
        "trn_X_Xf.npz",
        "corpus.jsonl",
        "queries.jsonl",
        "qrels/train.tsv",
        "pairs_train.tsv",
        "train.txt",
        "train_raw_texts.txt",
        "train_labels.txt",
        "train.csv",
        "labels.csv",
        "pairs_train.csv",
    ]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.dictionaries(NAMES, st.binary(max_size=200), max_size=5))
def test_any_files_are_read_or_refused(files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("any")
    write(folder, {**files})
    readers: list[Callable[[], object]] = [functools.partial(read_all, by_name(name), folder) for name in FORMATS]
    for read in (*readers, functools.partial(choose, str(folder))):
        message = ""
        try:
            read()
        except InputError as error:
            message = str(error)
        assert not message or REMEDY.search(message), message


@pytest.mark.parametrize("codec", ["gz", "bz2", "xz", "zst"])
def test_no_text_unpacks_to_a_thousand_times_its_bytes(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "UNSUSPECTED", 1 << 20)
    pack = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "zst": lambda data: pa.compress(data, "zstd"),
    }
    place = tmp_path / f"x.jsonl.{codec}"
    place.write_bytes(bytes(pack[codec](b"\n" * (4 << 20))))
    with pytest.raises(InputError, match="which is unusual for text"):
        list(base.LineBlocks(str(place), 1 << 20))


BOMB = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
from extremis.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("stored", [True, False])
def test_a_parquet_bomb_is_one_message(stored: bool, tmp_path: Path) -> None:
    """A value of 1 MiB in all rows: a few kilobytes that stand for a terabyte. `stored`: its schema says so."""
    rows = 1 << 20
    indices = pa.array(np.zeros(rows, np.int32))
    text = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * (1 << 20)]))
    names = pa.array([str(row) for row in range(rows)])
    labels = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32)), pa.array(["a"] * rows))
    raw = source(tmp_path / "raw", {"labels.jsonl": LABELS})
    pq.write_table(pa.table({"key": names, "text": text, "labels": labels}), raw / "train.parquet", store_schema=stored)
    command = [sys.executable, "-c", BOMB, "shard", str(raw), str(tmp_path / "data")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=300, check=False
    )
    check(Done(done.returncode, done.stdout, done.stderr), 2, "train.parquet", "memory")
    assert listing(tmp_path / "data") == []
