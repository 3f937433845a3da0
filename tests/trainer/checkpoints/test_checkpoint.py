"""Checkpoints: what was saved is loaded, damage is named, and half of one is none."""

from pathlib import Path

import pytest
import torch

import trainer.checkpoints
from schemas import storage
from schemas.errors import TableError
from schemas.layout import RunLayout
from schemas.manifest import unpublish
from schemas.storage import join
from trainer.checkpoints import (
    Checkpoint,
    CheckpointContents,
    CheckpointWriter,
    drop_old_checkpoints,
    latest_checkpoint,
)

LABELS, D = 10, 3


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunLayout:
    return RunLayout(str(tmp_path) if request.param == "local" else f"memory://checkpoints/{tmp_path.name}")


def tensors(seed: int) -> tuple[dict, dict]:
    generator = torch.Generator().manual_seed(seed)
    encoder = {
        "embedding": torch.randn(6, D, generator=generator),
        "feature_weights": torch.randn(6, generator=generator),
    }
    optimizer = {"step": torch.tensor(float(seed)), "moment": torch.randn(D, 2, generator=generator).T}
    vectors = {
        "weight": torch.randn(LABELS, D, generator=generator),
        "square": torch.randn(LABELS, generator=generator),
    }
    return {"encoder": encoder, "encoder-optimizer": optimizer}, vectors


def save(run: RunLayout, step: int) -> None:
    parts, rows = tensors(step)
    state = {"progress": {"step": step}, "none": None}
    contents = CheckpointContents(step, parts, rows, 0, LABELS, state, {"data": "0" * 64})
    CheckpointWriter(run, keep=99, background=False).save(contents)


def assert_saved(checkpoint: Checkpoint, step: int) -> None:
    parts, vectors = tensors(step)
    assert checkpoint.state == {"progress": {"step": step}, "none": None}
    for name, expected in parts.items():
        loaded = checkpoint.tensors(name)
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[key], expected[key]) for key in loaded)
    for name, value in vectors.items():
        assert torch.equal(checkpoint.vectors(name), value)


@pytest.mark.parametrize("rows_a_file", [1, 2, 4, 16])
def test_it_comes_back_however_its_rows_are_cut(
    run: RunLayout, rows_a_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.checkpoints, "FILE_BYTES", rows_a_file * 4 * (D + 1))
    save(run, 7)
    checkpoint = Checkpoint.open(run.checkpoint(7))
    assert_saved(checkpoint, 7)
    assert sum(shard.path.startswith("vectors-") for shard in checkpoint.table.shards) == -(-LABELS // rows_a_file)


def test_no_file_is_a_pickle(run: RunLayout) -> None:
    save(run, 1)
    names = storage.list_names(run.checkpoint(1))
    assert {name.rsplit(".", 1)[1] for name in names} == {"json", "safetensors"}


def test_the_newest_finished_one_is_taken(run: RunLayout) -> None:
    assert latest_checkpoint(run) is None
    for step in (9, 10, 100):
        save(run, step)
    unpublish(run.checkpoint(100))  # as if the writer had been killed before the manifest
    newest = latest_checkpoint(run)
    assert newest is not None
    assert_saved(newest, 10)
    save(run, 100)
    assert_saved(latest_checkpoint(run), 100)


def test_a_damaged_file_is_named(run: RunLayout) -> None:
    save(run, 3)
    checkpoint = Checkpoint.open(run.checkpoint(3))
    for shard in checkpoint.table.shards:
        place = join(checkpoint.table.url, shard.path)
        content = storage.read_bytes(place)
        storage.write_bytes(place, content[:-1] + bytes([content[-1] ^ 1]))
    for read in (lambda: checkpoint.tensors("encoder"), lambda: checkpoint.vectors("weight")):
        with pytest.raises(TableError, match=r"step-00000003/(encoder|vectors-\S+)\.safetensors: damaged"):
            read()


def test_old_ones_are_dropped_and_the_best_is_kept(run: RunLayout) -> None:
    for step in (5, 10, 15, 20):
        save(run, step)
    drop_old_checkpoints(run, keep=2, spare=5)
    assert storage.list_names(run.checkpoints) == ["step-00000005", "step-00000015", "step-00000020"]
    drop_old_checkpoints(run, keep=1)
    assert storage.list_names(run.checkpoints) == ["step-00000020"]
    assert_saved(latest_checkpoint(run), 20)


def test_half_of_one_counts_for_none(run: RunLayout) -> None:
    for step in (5, 10, 15):
        save(run, step)
    unpublish(run.checkpoint(15))
    drop_old_checkpoints(run, keep=1)
    assert storage.list_names(run.checkpoints) == ["step-00000010"]
