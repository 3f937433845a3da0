import contextlib
import io
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

TEXTS = "first point\nsecond \u2028 point\n\n"
MATRIX = "3 3\n2:1\n0:1.0 1:1.0\n1:1\n"


def npz(rows: list[list[int]], columns: int) -> bytes:
    dense = np.zeros((len(rows), columns))
    for row, labels in enumerate(rows):
        dense[row, labels] = 1
    out = io.BytesIO()
    scipy.sparse.save_npz(out, scipy.sparse.csr_matrix(dense))
    return out.getvalue()


NPZ = npz([[2], [0, 1], [1]], 3)
ONE = npz([[0]], 3)
NAMES = "a\nb\nc\n"
LAYOUTS: dict[str, dict[str, str | bytes]] = {
    "root": {
        "trn_X.txt": TEXTS,
        "trn_X_Y.txt": MATRIX,
        "Y.txt": NAMES,
        "tst_X.txt": "t\n",
        "tst_X_Y.txt": "1 3\n0:1\n",
    },
    "raw": {"raw/trn_X.txt": TEXTS, "Y.trn.npz": NPZ, "raw/Y.txt": NAMES, "raw/tst_X.txt": "t\n", "Y.tst.npz": ONE},
    "dotted": {
        "trn.raw.txt": TEXTS,
        "trn_X_Y.txt": MATRIX,
        "lbl.raw.txt": NAMES,
        "tst.raw.txt": "t\n",
        "tst_X_Y.npz": ONE,
    },
    "raw_data": {
        "raw_data/train.raw.txt": TEXTS,
        "trn_X_Y.npz": NPZ,
        "raw_data/label.raw.txt": NAMES.rstrip(),
        "raw_data/test.raw.txt": "t",
        "tst_X_Y.npz": ONE,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_rows", [1, 2, 100])
def test_golden(tmp_path: Path, layout: str, block_rows: int) -> None:
    write(tmp_path, LAYOUTS[layout])
    assert choose(str(tmp_path)).name == "xc-text"
    inputs, tables = read_all("xc-text", tmp_path, block_rows)
    assert (inputs.keyed, inputs.labels, inputs.features, inputs.splits) == (False, None, None, ("train", "test"))
    assert tables["train"].rows == [
        {"row": 0, "key": "#0", "text": "first point", "label_ids": [2], "merged": 0},
        {"row": 1, "key": "#1", "text": "second \u2028 point", "label_ids": [0, 1], "merged": 0},
        {"row": 2, "key": "#2", "text": "", "label_ids": [1], "merged": 0},
    ]
    assert tables["test"].rows == [{"row": 0, "key": "#0", "text": "t", "label_ids": [0], "merged": 0}]
    assert tables["labels"].rows == [{"row": row, "key": f"#{row}", "text": text} for row, text in enumerate("abc")]


def test_a_label_that_is_no_text_is_named(tmp_path: Path) -> None:
    write(tmp_path, {**LAYOUTS["root"], "Y.txt": b"a\n\xe9\nc\n"})
    (reject,) = read_all("xc-text", tmp_path)[1]["labels"].rejects
    assert (reject.file, reject.line, reject.reason) == ("Y.txt", 2, Reason.NOT_UNICODE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trn_X_Y.txt": None}, "no trn_X_Y.txt or .* here; found: .*Expected trn_X.txt"),
        ({"tst_X.txt": None}, "no tst_X.txt or .* here"),
        ({"trn.raw.txt": "x"}, "both trn_X.txt and trn.raw.txt are here"),
        ({"trn_X.txt": "one\ntwo\n"}, "trn_X.txt: incomplete: 2 lines, expected 3"),
        ({"trn_X.txt": "1\n2\n3\n4\n"}, "trn_X.txt, line 4: the header declares 3 rows"),
        ({"Y.trn.npz": NPZ}, "both trn_X_Y.txt and Y.trn.npz are here"),
        ({"trn_X_Y.txt": None, "Y.trn.npz": NPZ[:90]}, "Y.trn.npz: not a NumPy .npz file, or damaged"),
    ],
)
def test_one_clear_error(tmp_path: Path, changes: dict[str, str | bytes | None], message: str) -> None:
    files = {name: content for name, content in {**LAYOUTS["root"], **changes}.items() if content is not None}
    with pytest.raises(InputError, match=message):
        read_all("xc-text", write(tmp_path, files))


def test_a_split_without_texts_is_named(tmp_path: Path) -> None:
    write(tmp_path, {**LAYOUTS["root"], "val_X_Y.txt": "1 3\n1:1\n"})
    with pytest.raises(InputError, match=r"no val_X.txt or .* here"):
        read_all("xc-text", tmp_path)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12), min_size=1, max_size=8), st.integers(1, 5))
def test_texts_come_out_or_are_named(texts: list[bytes], block: int) -> None:
    texts = [text.translate(None, b"\r\n") for text in texts]
    texts[0] = b"first"
    root = "memory://text/some"
    storage.write_bytes(f"{root}/trn_X.txt", b"".join(text + b"\n" for text in texts))
    storage.write_bytes(f"{root}/trn_X_Y.txt", b"%d 9\n" % len(texts) + b"1:1\n" * len(texts))
    train = read_all("xc-text", root, block)[1]["train"]
    good = {row: text.decode() for row, text in enumerate(texts) if text.decode("utf-8", "ignore").encode() == text}
    assert {row["row"]: row["text"] for row in train.rows} == good
    assert all(reject.reason == Reason.NOT_UNICODE for reject in train.rejects)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.binary(max_size=30), min_size=3, max_size=3), st.integers(1, 4))
def test_hostile_bytes_are_an_input_error_or_rejects(contents: list[bytes], block: int) -> None:
    root = "memory://text/hostile"
    for name, content in zip(("trn_X.txt", "trn_X_Y.txt", "Y.txt"), contents, strict=True):
        storage.write_bytes(f"{root}/{name}", b"2 3\n" + content if name == "trn_X_Y.txt" else content)
    with contextlib.suppress(InputError):
        read_all("xc-text", root, block)
