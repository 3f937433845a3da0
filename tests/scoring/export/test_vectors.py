"""Vectors by label range: what was written is what is read, in any slice."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from scoring import vectors as module
from scoring.export import write_vector_files
from scoring.vectors import BATCHES, Vectors, choose_index, open_indexes, search_indexes, write_indexes
from search.torch_topk import top_k


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_files_hold_the_rows(tmp_path: Path, dtype: str) -> None:
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32))
    (shard,), read = write_vector_files("v", 7, lambda start, stop: rows[start:stop], str(tmp_path), dtype, tmp_path)
    np.testing.assert_array_equal(read[:], rows.numpy().astype(dtype))
    read[:][0] = 7  # in memory alone
    np.testing.assert_array_equal(load_file(tmp_path / shard.path)["weight"], rows.numpy().astype(dtype))


def test_no_rows(tmp_path: Path) -> None:
    read = write_vector_files("v", 0, lambda start, stop: torch.empty(0, 4), str(tmp_path), "float32", tmp_path)[1]
    assert read.shape == (0, 4)


def test_slices_go_over_the_edges_of_files(tmp_path: Path) -> None:
    whole = np.random.default_rng(1).standard_normal((17, 3)).astype(np.float32)
    vectors = Vectors([whole[:5], whole[5:6], whole[6:]])
    assert (len(vectors), vectors.shape) == (17, (17, 3))
    for start in range(18):
        for stop in range(start, 20):
            np.testing.assert_array_equal(vectors[start:stop], whole[start:stop])
    queries = torch.from_numpy(np.random.default_rng(2).standard_normal((4, 3)).astype(np.float32))
    scores, labels = top_k(queries, torch.from_numpy(whole), 6, block_rows=4)
    ids, found = search_indexes(vectors.indexed, queries.numpy(), 6)
    np.testing.assert_array_equal(ids, labels)
    np.testing.assert_allclose(found, scores, atol=1e-6)
    np.testing.assert_allclose(vectors.score(queries.numpy(), ids), scores, atol=1e-6)


@pytest.mark.parametrize("purpose", BATCHES)
def test_many_labels_get_the_index_that_was_weighed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, purpose: str
) -> None:
    monkeypatch.setattr(module, "EXACT_LABELS", 1000)
    draw = np.random.default_rng(3)
    rows = draw.standard_normal((60, 8)).repeat(50, axis=0) + 0.1 * draw.standard_normal((3000, 8))
    labels, queries = Vectors([rows.astype(np.float32)]), draw.standard_normal((50, 8)).astype(np.float32)
    arguments = queries, 10, 0.9, BATCHES[purpose]
    assert choose_index("auto", Vectors([labels[:1000]]), *arguments)[0] is None
    assert choose_index("none", labels, *arguments) == (None, None, [])
    assert choose_index("IVF4,Flat", labels, *arguments)[0] == "IVF4,Flat"
    spec, index, plans = choose_index("auto", labels, *arguments)
    assert spec is not None
    assert index is not None
    assert len(plans) == 4
    shards, facts = write_indexes(spec, labels, queries, 10, 0.9, str(tmp_path / "first"), first=index)
    others, again = write_indexes(spec, labels, queries, 10, 0.9, str(tmp_path / "anew"))
    assert facts == again
    assert [shard.sha256 for shard in shards] == [shard.sha256 for shard in others]
    opened = open_indexes([str(tmp_path / "first" / shard.path) for shard in shards], facts, labels)
    found, exact = (search_indexes(of, queries, 10)[0] for of in (opened, labels.indexed))
    assert np.mean([np.isin(best, ours).mean() for best, ours in zip(exact, found, strict=True)]) >= 0.9
    monkeypatch.setattr(module, "free_memory", lambda: 1)
    assert choose_index("auto", labels, *arguments)[0] is None  # nothing but exact search fits
