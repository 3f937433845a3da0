import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats import xc
from schemas import storage
from schemas.errors import InputError

URL = "memory://npz/m.npz"


def saved(matrix: Any, compressed: bool = True) -> bytes:
    out = io.BytesIO()
    scipy.sparse.save_npz(out, matrix, compressed=compressed)
    return out.getvalue()


def arrays(**changes: Any) -> bytes:
    """A matrix of 2 rows and 5 columns, with arrays replaced or, by None, left out."""
    whole = {
        "format": np.array(b"csr"),
        "shape": np.array([2, 5]),
        "indptr": np.array([0, 2, 3], np.int32),
        "indices": np.array([4, 1, 0], np.int32),
        "data": np.array([1.0, 2.0, 3.0]),
    }
    out = io.BytesIO()
    np.savez(out, **{name: value for name, value in {**whole, **changes}.items() if value is not None})
    return out.getvalue()


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 40), st.integers(1, 8), st.booleans(), st.sampled_from("bifd"))
def test_what_scipy_saves_comes_back(rows: int, columns: int, block: int, compressed: bool, kind: str) -> None:
    dense = np.random.default_rng(rows).integers(0, 4, (rows, columns)) % 3
    matrix = scipy.sparse.csr_matrix(dense.astype(np.dtype(kind)))
    storage.write_bytes(URL, saved(matrix, compressed))
    assert xc.read_shape(URL) == (rows, columns)
    blocks = list(xc.read_rows(URL, block))
    assert all(len(rows_block.offsets) == block + 1 for rows_block in blocks[:-1])
    out = np.zeros((0, columns), np.float32)
    for rows_block in blocks:
        part = np.zeros((len(rows_block.offsets) - 1, columns), np.float32)
        part[rows_block.row_of(), rows_block.ids] = rows_block.values
        out = np.concatenate([out, part])
    assert np.array_equal(out, dense)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a NumPy .npz file, or damaged"),
        (b"3 4\n1:1\n", "not a NumPy .npz file, or damaged"),
        (arrays()[:300], "not a NumPy .npz file, or damaged"),
        (saved(scipy.sparse.csc_matrix(np.eye(3))), r"a matrix in 'csc' order; expected 'csr'.*tocsr\(\)"),
        (saved(scipy.sparse.coo_matrix(np.eye(3))), "a matrix in 'coo' order|no array"),
        (arrays(indptr=None), "no array indptr in the file"),
        (arrays(format=np.array([b"csr", b"csr"])), "the array format is not a string"),
        (arrays(shape=np.array([2, 5, 1])), "the shape has 3 numbers"),
        (arrays(shape=np.array([-2, 5])), "unusable shape -2 × 5"),
        (arrays(shape=np.array([2.0, 5.0])), "the array shape has the type float64"),
        (arrays(indptr=np.array([0, 3], np.int32)), "which do not form a matrix of 2 rows"),
        (arrays(indptr=np.array([1, 2, 3], np.int32)), "indptr starts with 1, not 0"),
        (arrays(indptr=np.array([0, 4, 3], np.int32)), "indptr decreases, or points past the end"),
        (arrays(indptr=np.array([0, 2, 9], np.int32)), "indptr decreases, or points past the end"),
        (arrays(indptr=np.array([0, 1, 2], np.int32)), "indptr ends with 2, but there are 3 entries"),
        (arrays(indices=np.array([4, 1, 5], np.int32)), "row 1 has column 5, but there are 5 columns"),
        (arrays(indices=np.array([-1, 1, 0], np.int32)), "row 0 has column -1, but there are 5 columns"),
        (arrays(indices=np.array([[4], [1], [0]], np.int32)), "the array indices has the type int32"),
        (arrays(data=np.array([1.0, 2.0])), "which do not form a matrix of 2 rows"),
        (arrays(data=np.array([1.0, 2.0, None], object)), r"not contain plain numbers \(pickled\?\)"),
        (arrays(data=np.array(["a", "b", "c"])), "the array data has the type <U1"),
        (arrays(data=np.array([1j, 1j, 1j])), "not contain plain numbers"),
    ],
)
def test_what_is_no_csr_matrix_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    place = tmp_path / "Y.trn.npz"
    place.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        list(xc.read_rows(str(place), 2))
    assert str(place) in str(caught.value)
    assert "save_npz" in str(caught.value)


WHOLE = {
    packed: saved(scipy.sparse.random(60, 50, 0.1, format="csr", random_state=0), packed) for packed in (True, False)
}


@settings(deadline=None, max_examples=300)
@given(st.booleans(), st.data())
def test_damage_is_an_input_error_or_harmless(compressed: bool, data: st.DataObject) -> None:
    content = bytearray(WHOLE[compressed])
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    storage.write_bytes(URL, bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]))
    try:
        rows = sum(len(rows_block.offsets) - 1 for rows_block in xc.read_rows(URL, 16))
    except InputError:
        return
    assert rows == 60


def test_a_changed_value_is_found_by_its_checksum() -> None:
    content = bytearray(arrays())
    position = content.index(np.array([1.0, 2.0, 3.0]).tobytes())
    content[position + 6] ^= 1
    storage.write_bytes(URL, bytes(content))
    with pytest.raises(InputError, match=r"Bad CRC-32 for file 'data.npy'"):
        list(xc.read_rows(URL, 16))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"memory://npz/none.npz: file not found"):
        xc.read_shape("memory://npz/none.npz")
