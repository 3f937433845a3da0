"""What does not fit on the disk is refused before anything is written there; scratch files have their room."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipelines.mine import MineOptions, mine
from schemas import storage
from schemas.errors import RoomError, recognise
from schemas.mapped import ScratchFile
from schemas.shard_files.parquet import writing_shard
from schemas.storage import with_room
from schemas.table import Table
from search.index import write_index
from search.topk import Block
from tests.builders import build_data
from tests.command import ROOT, call, refused, sets
from tests.pipelines.mining.world import apart, random_world
from trainer.heads import open_label_texts


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of 16 KiB, or of another size."""
    disk, size = tmp_path / "disk", getattr(request, "param", "16k")
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", disk]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
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
    refused(call("shard", raw, small_disk / "data"), "of rows", "16.0 KiB are free", "Choose another location.")
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


@pytest.mark.parametrize("small_disk", ["1m"], indirect=True)
def test_a_disk_that_fills_while_mining(tmp_path: Path, small_disk: Path) -> None:
    """Nothing is published, finished shards stay, and the same command goes on from them when there is room."""
    world = random_world(str(tmp_path), rows=2000, labels=400, dimension=8, width=20, shards=5, row_group_rows=64)
    world.write_dump()
    out, filler, lines = small_disk / "out", small_disk / "filler", list[str]()
    options = MineOptions(out=str(out), index="exact", block_rows=100, query_batch=64)
    options = apart(world, options)

    def say(line: str) -> None:
        lines.append(line)
        if "pass 3 of 5" in line and not filler.exists():
            with contextlib.suppress(OSError), open(filler, "wb", 0) as file:
                while file.write(bytes(1024)):
                    pass

    needed = (
        r"out: the command writes at least .* of tables and .* of candidates, and 0 B are free\. Free some.* continues"
    )
    with pytest.raises(RoomError, match=needed):
        mine(world.data, world.run, options=options, progress=say)
    assert not (out / "queries").exists()
    filler.unlink()
    filler.touch()
    mine(world.data, world.run, options=options, progress=say)
    assert "epoch 3: resuming, 2 of 5 shards are finished" in lines
    Table.open(str(out / "queries"), "negatives").verify()


def test_whoever_writes_more_than_a_disk_has_names_it(small_disk: Path) -> None:
    """Files, shards and indexes alike: what Faiss writes by itself may end early in silence."""
    vectors = np.ones((4000, 8), np.float32)
    column = {"a": np.random.default_rng(0).integers(0, 1 << 40, 9000)}

    def bytes_of(url: str) -> None:
        with storage.writing(url) as path:
            Path(path).write_bytes(bytes(1 << 16))

    def shard(url: str) -> None:
        with writing_shard(url, 0, 1, pa.schema({"a": pa.int64()}), 1000) as out:
            out.write(pa.table(column))

    def index(url: str) -> None:
        write_index(url, "index", Block(0, vectors))

    full = r"file: the disk is full: the command writes about 1.0 KiB of bytes\. Remove some\."
    for write in (bytes_of, shard, index):
        with pytest.raises(RoomError, match=full), with_room(str(small_disk / "file"), "bytes", 1024, "Remove some."):
            write(str(small_disk / "file"))
        assert not [path for path in small_disk.rglob("*") if path.is_file()]


def test_scratch(data: Path, trained: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    run, words = small_disk.parent / "run", ("16.0 KiB are free", "Set TMPDIR")
    options = sets("encoder.dimension=64", "train.freeze_encoder=true", f"train.encoder_from={trained}")
    refused(
        call("train", "astra", data, run, *options), "KiB of embeddings for dumps and", "of a frozen encoder", *words
    )
    assert not list(small_disk.iterdir())
    assert not run.exists()


_FULL = """
import sys
from schemas.mapped import ScratchFile
scratch = ScratchFile("pages").reserve(8192)
try:
    with open(sys.argv[1] + "/other", "wb") as file:
        while file.write(bytes(4096)) and not file.flush():
            pass
except OSError as error:
    print(error.strerror)
scratch[:] = bytes([7]) * 8192
print(sum(scratch[:]))
"""


def test_a_scratch_file_has_its_room_when_the_disk_is_full(small_disk: Path) -> None:
    """A page without room would end the process by SIGBUS."""
    command = [sys.executable, "-c", _FULL, str(small_disk)]
    done = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(small_disk)}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split("\n")) == (0, ["No space left on device", str(7 * 8192), ""]), (
        done.stderr
    )
    (small_disk / "other").unlink()
    needed = r"disk: pages need 20.0 KiB, and 16.0 KiB are free. Choose another directory\.$"
    with pytest.raises(RoomError, match=needed):
        ScratchFile("pages", str(small_disk)).reserve(20 << 10)


def test_label_texts(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = build_data(str(tmp_path / "data"))
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    (small_disk / "other").write_bytes(bytes(12 << 10))
    with pytest.raises(RoomError, match=r"the texts of labels need .*, and 0 B are free\. Set TMPDIR"):
        open_label_texts(data.layout, "tokens")


@pytest.mark.parametrize("small_disk", ["8k"], indirect=True)
def test_a_full_tmpdir_is_named(data: Path, trained: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SafetensorError has no error number, and OSErrors of copies no file: both are of TMPDIR."""
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    out = small_disk.parent / "export"
    full = f"no space left in {small_disk}", "set TMPDIR to a folder with more room"
    refused(call("export", data, trained, out), *full, status=6)
    assert not out.exists()
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", None)
        assert call("export", data, trained, out).status == 0
    texts = small_disk.parent / "texts.txt"
    texts.write_text("a ship\n" * 10_000)
    with texts.open() as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", file)
        refused(call("predict", out, "-", small_disk.parent / "out.jsonl"), *full, status=6)
    assert not (small_disk.parent / "out.jsonl").exists()
    written = pytest.raises(RoomError, match=f"could not write memory://x: {full[0]}; {full[1]}")
    with written, storage.writing("memory://x") as path:
        Path(path).write_bytes(bytes(1 << 16))
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize("small_disk", ["256k"], indirect=True)
@pytest.mark.parametrize(
    ("left", "words"),
    [(256, "could not write memory://room/run/checkpoints"), pytest.param(0, "no space", marks=pytest.mark.slow)],
)
def test_a_run_in_a_store_writes_to_tmpdir_first(
    data: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, left: int, words: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    (small_disk / "other").write_bytes(bytes((256 - left) << 10))
    choices = sets("train.epochs=1", "encoder.buckets=65536")
    done = call("train", "random", data, "memory://room/run", *choices)
    refused(done, words, f"no space left in {small_disk}", "set TMPDIR to a folder with more room", status=6)


def test_no_disk_at_all_takes_a_temporary_file(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp', '/']")
    for error in (missing, OSError("8192 requested and 0 written"), OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))):
        wrapped = RuntimeError("a step failed")
        wrapped.__cause__ = error
        assert "no space left in" in str(recognise(wrapped))
    assert recognise(ValueError("no table")) is None
