import contextlib
import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats import choose
from pipelines.formats.base import Reason
from schemas import storage
from schemas.errors import InputError
from tests.pipelines.formats.forms import read_all, write
from tests.pipelines.raw import read_lines, write_tate

# Two labels of point 0, one of point 1 (named twice), two of point 2; the header declares a label and features beyond.
FILES: dict[str, str | bytes] = {
    "trn_X_Y.txt": "3 6\n4:1.0 0:1.0\n2:1 2:1\n1:0.5 3:1 5:0\n",
    "trn_X_Xf.txt": "3 100\n7:0.25 3:-1.5\n\n99:1e-3 0:2\n",
    "tst_X_Y.txt": "1 6\n3:1.0\n",
    "tst_X_Xf.txt": "1 100\n1:1 1:2\n",
    "lbl_X_Xf.txt": "6 100\n0:1\n1:1\n2:1\n3:1\n4:1\n",
}
JSON = [{"uid": "a", "title": "t", "content": "c"}, {"uid": "b", "title": "u"}, {"uid": "c", "title": ""}]
TRAIN = [
    {"label_ids": [0, 4], "feature_ids": [3, 7], "feature_values": [-1.5, 0.25], "merged": 0},
    {"label_ids": [2], "feature_ids": [], "feature_values": [], "merged": 1},
    {"label_ids": [1, 3], "feature_ids": [0, 99], "feature_values": [2.0, float(np.float32(1e-3))], "merged": 0},
]


def packed(records: list[dict[str, object]]) -> bytes:
    return gzip.compress(b"".join(json.dumps(record).encode() + b"\n" for record in records))


def text_of(matrix: scipy.sparse.csr_matrix) -> bytes:
    rows = [" ".join(f"{i}:{v}" for i, v in zip(row.indices, row.data, strict=True)) for row in matrix]
    return "\n".join([f"{matrix.shape[0]} {matrix.shape[1]}", *rows, ""]).encode()


@pytest.mark.parametrize("block_rows", [1, 2, 100])
def test_golden(tmp_path: Path, block_rows: int) -> None:
    inputs, tables = read_all("xc-sparse", write(tmp_path, FILES), block_rows)
    assert (inputs.format, inputs.keyed, inputs.labels, inputs.features) == ("xc-sparse", False, 6, 100)
    assert inputs.splits == ("train", "test")
    expected = [{"row": row, "key": f"#{row}", "text": "", **columns} for row, columns in enumerate(TRAIN)]
    assert tables["train"].rows == expected
    (test,) = tables["test"].rows
    assert (test["label_ids"], test["feature_ids"], test["feature_values"]) == ([3], [1], [3.0])
    assert tables["labels"].column("row") == list(range(6))
    assert tables["labels"].column("feature_ids") == [[0], [1], [2], [3], [4], []]
    assert tables["labels"].column("text") == [""] * 6
    assert not any(table.rejects for table in tables.values())


def test_labels_without_a_file_are_known_by_number(tmp_path: Path) -> None:
    files = {name: content for name, content in FILES.items() if not name.startswith("lbl")}
    inputs, tables = read_all("xc-sparse", write(tmp_path, files), 4)
    assert inputs.labels == 6
    assert tables["labels"].rows == [{"row": row, "key": f"#{row}", "text": ""} for row in range(6)]


@pytest.mark.parametrize("name", ["trn_X.txt", "raw/trn_X.txt", "trn.raw.txt", "raw_data/train.raw.txt", "X.trn.txt"])
def test_texts_beside_the_features(tmp_path: Path, name: str) -> None:
    write(tmp_path, {**FILES, name: "one\n\nthree é\n", "lbl.raw.txt.gz": gzip.compress(b"a\nb\nc\nd\ne\nf\n")})
    _, tables = read_all("xc-sparse", tmp_path)
    assert tables["train"].column("text") == ["one", "", "three é"]
    assert tables["train"].column("feature_ids") == [row["feature_ids"] for row in TRAIN]
    assert tables["test"].column("text") == [""]
    assert tables["labels"].column("text") == list("abcdef")


def test_raw_records_beside_the_features_give_keys_and_texts(tmp_path: Path) -> None:
    write(tmp_path, {**FILES, "trn.json.gz": packed(JSON)})
    _, tables = read_all("xc-sparse", tmp_path)
    assert tables["train"].column("key") == ["a", "b", "c"]
    assert tables["train"].column("text") == ["t\nc", "u", ""]
    assert tables["train"].column("label_ids") == [row["label_ids"] for row in TRAIN]
    assert read_all("xc-sparse", tmp_path, text="title")[1]["train"].column("text") == ["t", "u", ""]


def test_raw_records_give_the_labels_where_there_is_no_matrix_of_them(tmp_path: Path) -> None:
    records = [{**record, "target_ind": [row, 5]} for row, record in enumerate(JSON)]
    records[1]["target_ind"] = []
    files = {"trn_X_Xf.txt": "3 9\n1:1\n2:1\nx\n", "trn.json.gz": packed(records), "lbl.json.gz": packed(JSON * 2)}
    inputs, tables = read_all("xc-sparse", write(tmp_path, files))
    assert inputs.labels is None
    (row,) = tables["train"].rows
    assert (row["key"], row["label_ids"], row["feature_ids"], row["feature_values"]) == ("a", [0, 5], [1], [1.0])
    reasons = [(reject.file, reject.line, reject.reason) for reject in tables["train"].rejects]
    assert reasons == [("trn.json.gz", 2, Reason.NO_LABELS), ("trn_X_Xf.txt", 4, Reason.MALFORMED)]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 30), st.integers(1, 5), st.booleans(), st.integers(0, 99))
def test_round_trip_of_text_and_npz(rows: int, labels: int, features: int, block: int, npz: bool, seed: int) -> None:
    generator = np.random.default_rng(seed)
    of_labels = scipy.sparse.csr_matrix(generator.random((rows, labels)) < 0.5, dtype=np.float32)
    of_features = scipy.sparse.random(rows, features, 0.4, "csr", np.float32, generator)
    root = "memory://sparse/round"
    storage.remove(root, recursive=True)
    for name, matrix in (("trn_X_Y", of_labels), ("trn_X_Xf", of_features)):
        out = io.BytesIO()
        scipy.sparse.save_npz(out, matrix)
        storage.write_bytes(f"{root}/{name}.{'npz' if npz else 'txt'}", out.getvalue() if npz else text_of(matrix))
    inputs, tables = read_all("xc-sparse", root, block)
    assert (inputs.labels, inputs.features) == (labels, features)
    train = tables["train"]
    empty = np.flatnonzero(of_labels.getnnz(axis=1) == 0)
    assert [reject.line - (1 if npz else 2) for reject in train.rejects] == empty.tolist()
    assert {reject.reason for reject in train.rejects} <= {Reason.NO_LABELS}
    for row in train.rows:
        assert row["label_ids"] == sorted(of_labels[row["row"]].indices.tolist())
        expected = of_features[row["row"]].toarray()[0]
        got = np.zeros(features, np.float32)
        got[row["feature_ids"]] = row["feature_values"]
        assert np.allclose(got, expected, rtol=1e-6)


def test_real_texts_as_features_beside_their_records(tmp_path: Path) -> None:
    text = pytest.importorskip("sklearn.feature_extraction.text", reason="scikit-learn makes the TF-IDF features")
    write_tate(tmp_path, 200, 50)
    points = [read_lines(tmp_path / f"{stem}.json.gz") for stem in ("trn", "tst")]
    vectorizer = text.TfidfVectorizer(dtype=np.float32)
    vectorizer.fit([record["title"] for record in points[0]])
    matrices = [vectorizer.transform([f"{p['title']} {p['content']}" for p in some]).tocsr() for some in points]
    for stem, matrix in zip(("trn", "tst"), matrices, strict=True):
        (tmp_path / f"{stem}_X_Xf.txt").write_bytes(text_of(matrix))
    inputs, tables = read_all("xc-sparse", tmp_path, 64)
    assert inputs.features == len(vectorizer.vocabulary_)
    for split, some, matrix in zip(("train", "test"), points, matrices, strict=True):
        assert tables[split].column("key") == [record["uid"] for record in some]
        assert tables[split].column("label_ids") == [sorted(set(record["target_ind"])) for record in some]
        got = np.concatenate(tables[split].column("feature_values"))
        matrix.sort_indices()
        assert np.concatenate(tables[split].column("feature_ids")).tolist() == matrix.indices.tolist()
        assert np.array_equal(got.astype(np.float32), matrix.data)


def test_the_same_in_every_dress(tmp_path: Path) -> None:
    plain = read_all("xc-sparse", write(tmp_path / "a", FILES))[1]
    dressed: dict[str, str | bytes] = {}
    for name, content in FILES.items():
        assert isinstance(content, str)
        dressed[f"{name}.gz"] = gzip.compress(b"\xef\xbb\xbf" + content.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    assert read_all("xc-sparse", write(tmp_path / "b", dressed))[1]["train"].rows == plain["train"].rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trn_X_Xf.txt": None}, r"no trn_X_Xf.txt or .* here; found: lbl_X_Xf.txt, .*Expected trn_X_Xf.txt"),
        ({"trn_X_Y.txt": None}, "no trn_X_Y.txt or .* here"),
        ({"tst_X_Xf.txt": None}, "no tst_X_Xf.txt or .* here"),
        ({"trn_X_Y.txt.gz": b""}, "both trn_X_Y.txt and trn_X_Y.txt.gz are here"),
        ({"trn_X_Y.txt": ""}, "trn_X_Y.txt: the file is empty"),
        ({"trn_X_Y.txt": "\n"}, "trn_X_Y.txt, line 1: expected the header `rows columns`, two whole numbers; got ''"),
        ({"trn_X_Y.txt": "0:1 2:1\n2:1\n3:1\n"}, "line 1: expected the header.*got '0:1 2:1'"),
        ({"trn_X_Y.txt": "3 6 7\n"}, "line 1: expected the header.*got '3 6 7'"),
        ({"trn_X_Y.txt": "-3 6\n"}, "line 1: expected the header.*got '-3 6'"),
        ({"trn_X_Y.txt": b"\xff\xfe3\x00"}, "line 1: expected the header.*got '3'"),
        ({"trn_X_Y.txt.gz": b"3 6\n", "trn_X_Y.txt": None}, "not a gzip file"),
        ({"trn_X_Y.txt": "4 6\n1:1\n1:1\n1:1\n1:1\n"}, r"trn_X_Y.txt declares 4 and .*trn_X_Xf.txt declares 3 rows"),
        ({"trn_X_Y.txt": "3 5\n4:1\n5:1\n1:1\n"}, "trn_X_Y.txt, line 3: index 5 .* 5 labels"),
        ({"trn_X_Xf.txt": "3 99\n1:1\n1:1\n99:1\n"}, "trn_X_Xf.txt, line 4: index 99 .* 99 features"),
        ({"trn_X_Y.txt": "3 6\n1:1\n1:1\n1:1\n2:1\n"}, "trn_X_Y.txt, line 5: the header declares 3 rows, .*: '2:1'"),
        ({"trn_X_Y.txt": "3 6\n1:1\n1:"}, "trn_X_Y.txt: incomplete: 2 lines after the header, expected 3"),
        ({"trn_X_Y.txt": "9000 6\n1:1\n", "trn_X_Xf.txt": "9000 6\n"}, "incomplete: 1 lines after the header"),
        ({"trn_X.txt": "one\ntwo\n"}, "trn_X.txt: incomplete: 2 lines, expected 3, as the header of the other matrix"),
        ({"trn_X.txt": "one\ntwo\nthree\nfour\n"}, "trn_X.txt, line 4: the header declares 3 rows"),
        ({"lbl_X_Xf.txt": "5 100\n"}, r"lbl_X_Xf.txt: the header declares 5 rows, one for each label, .* 6 columns"),
        ({"lbl_X_Xf.txt": "6 99999999999\n"}, "the header declares 99,999,999,999 features"),
        ({"lbl_X_Xf.txt": None, "trn_X_Y.txt": "3 99999999999\n1:1\n1:1\n1:1\n"}, "99,999,999,999 labels for 4"),
    ],
)  # fmt: skip
def test_one_clear_error(tmp_path: Path, changes: dict[str, str | bytes | None], message: str) -> None:
    files = {name: content for name, content in {**FILES, **changes}.items() if content is not None}
    with pytest.raises(InputError, match=message) as caught:
        read_all("xc-sparse", write(tmp_path, files), 2)
    assert "\n" not in str(caught.value)


def test_the_header_may_state_more(tmp_path: Path) -> None:
    files = {"trn_X_Y.txt": "4 50\n1:1\n2:1\n", "trn_X_Xf.txt": "4 1000\n1:1\n2:1\n\n"}
    inputs, tables = read_all("xc-sparse", write(tmp_path, files))
    assert (inputs.labels, inputs.features) == (50, 1000)
    assert tables["train"].column("label_ids") == [[1], [2]]
    assert [(reject.line, reject.reason) for reject in tables["train"].rejects] == [
        (4, Reason.NO_LABELS),
        (5, Reason.NO_LABELS),
    ]
    assert len(tables["labels"].rows) == 50


@pytest.mark.parametrize(
    ("changes", "file", "line", "reason", "detail"),
    [
        ({"trn_X_Y.txt": "3 6\n1:1\n2\n1:1\n"}, "trn_X_Y.txt", 3, Reason.MALFORMED, "such as 12:1.0, got '2'"),
        ({"trn_X_Y.txt": "3 6\n1:1\n1:1\n\n"}, "trn_X_Y.txt", 4, Reason.NO_LABELS, "the point has no labels"),
        ({"trn_X_Y.txt": "3 6\n1:1\n1:1\n1:0\n"}, "trn_X_Y.txt", 4, Reason.NO_LABELS, "the point has no labels"),
        ({"trn_X_Xf.txt": "3 9\n1:x\n1:1\n1:1\n"}, "trn_X_Xf.txt", 2, Reason.MALFORMED, "got '1:x'"),
        ({"trn_X_Xf.txt": "3 9\n1:1\n1:nan\n1:1\n"}, "trn_X_Xf.txt", 3, Reason.MALFORMED, "got '1:nan'"),
        ({"trn_X_Xf.txt": "3 9\n1:1\n1:9e99\n1:1\n"}, "trn_X_Xf.txt", 3, Reason.MALFORMED, "32-bit float"),
        ({"trn_X.txt": b"a\nb\n\xffc\n"}, "trn_X.txt", 3, Reason.NOT_UNICODE, "byte 0 is not UTF-8"),
        ({"trn.json.gz": packed([JSON[0], {}, JSON[1]])}, "trn.json.gz", 2, Reason.MISSING_FIELD, "'title'"),
    ],
)  # fmt: skip
def test_one_bad_row_is_rejected_and_named(
    tmp_path: Path, changes: dict[str, str | bytes], file: str, line: int, reason: Reason, detail: str
) -> None:
    _, tables = read_all("xc-sparse", write(tmp_path, {**FILES, **changes}), 2)
    (reject,) = tables["train"].rejects
    assert (reject.file, reject.line, reject.reason) == (file, line, reason)
    assert detail in reject.detail
    assert len(tables["train"].rows) == 2


HOSTILE = st.binary(max_size=40) | st.text("0123456789: .\n-e", max_size=40).map(str.encode)


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 4))
def test_hostile_bytes_are_an_input_error_or_rejects(data: st.DataObject, block: int) -> None:
    root = "memory://sparse/hostile"
    storage.remove(root, recursive=True)
    for name, content in FILES.items():
        assert isinstance(content, str)
        hostile = data.draw(st.sampled_from([st.just(content.encode()), HOSTILE, HOSTILE.map(lambda b: b"3 6\n" + b)]))
        storage.write_bytes(f"{root}/{name}", data.draw(hostile) or b"\n")
    with contextlib.suppress(InputError):
        read_all("xc-sparse", root, block)


def test_the_form_is_found_by_its_names(tmp_path: Path) -> None:
    assert choose(str(write(tmp_path / "a", FILES))).name == "xc-sparse"
    write(tmp_path / "b", {**FILES, "trn_X.txt": "a\nb\nc\n", "Y.txt": "a\n"})
    assert choose(str(tmp_path / "b")).name == "xc-sparse"
    write(tmp_path / "c", {**FILES, "trn.json.gz": b"", "lbl.json.gz": b""})
    with pytest.raises(InputError, match=r"looks like xc and xc-sparse.*Give format"):
        choose(str(tmp_path / "c"))
    assert choose(str(tmp_path / "c"), "xc-sparse").name == "xc-sparse"
