"""What does not fit on the disk is refused before anything is written there."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import call, refused, sets


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", disk], check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a dump and a checkpoint."""
    run = tmp_path_factory.mktemp("room") / "run"
    options = sets("train.epochs=3", "refresh.start=2", "encoder.dimension=64")
    done = call("train", "astra", data, run, *options, "--set", "logging.tensorboard=false")
    assert done.status == 0, done.err
    return run


def test_shard(tmp_path: Path, small_disk: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "labels.jsonl").write_text('{"key": "a", "text": "b"}\n')
    (raw / "train.jsonl").write_text('{"key": "c", "text": "d", "labels": ["a"]}\n' * 2_000)
    refused(call("shard", raw, small_disk / "data"), "of rows", "16.0 KiB are free", "Choose another place.")
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize("command", ["embed", "export"])
def test_vectors(data: Path, trained: Path, small_disk: Path, command: str) -> None:
    refused(call(command, data, trained, small_disk / "out"), "16.0 KiB are free", "--dtype float16")
    assert not list(small_disk.iterdir())


def test_mine(data: Path, trained: Path, small_disk: Path) -> None:
    run, negatives = small_disk.parent / "run", small_disk / "negatives"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("negatives*"))
    negatives.mkdir()
    (run / "negatives").symlink_to(negatives)
    refused(call("mine", data, run, "--width", "100"), "of tables", "16.0 KiB are free", "--width")
    assert not list(negatives.iterdir())
