"""Nearest vectors by PyTorch alone, as on a machine with a GPU and without Faiss."""

import numpy as np
import pytest

from search import nearest
from search.nearest import DeviceVectors, find_device


@pytest.mark.parametrize("device", ["cpu:0", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_of_vectors_are_merged(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "_SCORES_ON_DEVICE", 64)
    draw = np.random.default_rng(0)
    vectors, x = draw.standard_normal((100, 8)).astype(np.float32), draw.standard_normal((4, 8)).astype(np.float32)
    scores, positions = DeviceVectors(vectors, device).nearest(x, 7)
    np.testing.assert_array_equal(positions, np.argsort(-(x @ vectors.T), axis=1)[:, :7])
    np.testing.assert_allclose(scores, np.take_along_axis(x @ vectors.T, positions, 1), rtol=1e-5)


@pytest.mark.gpu
def test_a_gpu_finds_what_a_cpu_finds() -> None:
    pytest.importorskip("faiss")
    from search.block import Block, search_exactly

    draw = np.random.default_rng(1)
    vectors, x = (
        draw.standard_normal((50_000, 64)).astype(np.float32),
        draw.standard_normal((700, 64)).astype(np.float32),
    )
    there = Block(0, vectors, None, find_device("auto"))
    np.testing.assert_array_equal(search_exactly(there, x, 50), search_exactly(Block(0, vectors), x, 50))
