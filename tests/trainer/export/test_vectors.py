"""Vectors by label range: what was written is what is read, in any slice."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from schemas.mapped import Mapped
from trainer.evaluation.search import top_k
from trainer.export.vectors import Vectors, map_vectors, read_vectors, write_vectors


def both_ways(path: Path) -> tuple[np.ndarray, np.ndarray]:
    return read_vectors(path.read_bytes()), map_vectors(Mapped(str(path), private=True))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_files_hold_the_rows(tmp_path: Path, dtype: str) -> None:
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32))
    write_vectors(tmp_path / "v", rows, 40, dtype)
    for read in both_ways(tmp_path / "v"):
        np.testing.assert_array_equal(read, rows.numpy().astype(dtype))
        read[0] = 7  # in memory alone
    np.testing.assert_array_equal(load_file(tmp_path / "v")["weight"], rows.numpy().astype(dtype))


def test_no_rows(tmp_path: Path) -> None:
    write_vectors(tmp_path / "v", torch.empty(0, 4), 0, "float32")
    for read in both_ways(tmp_path / "v"):
        assert read.shape == (0, 4)


def test_slices_go_over_the_edges_of_files(tmp_path: Path) -> None:
    whole = np.random.default_rng(1).standard_normal((17, 3)).astype(np.float32)
    vectors = Vectors([whole[:5], whole[5:6], whole[6:]])
    assert (len(vectors), vectors.shape) == (17, (17, 3))
    for start in range(18):
        for stop in range(start, 20):
            np.testing.assert_array_equal(vectors[start:stop], whole[start:stop])
    queries = torch.from_numpy(np.random.default_rng(2).standard_normal((4, 3)).astype(np.float32))
    expected = top_k(queries, torch.from_numpy(whole), 6, block_rows=4)
    for part, expected_part in zip(top_k(queries, vectors, 6, block_rows=4), expected, strict=True):
        torch.testing.assert_close(part, expected_part, rtol=0, atol=1e-6)
