"""Checkpoints by rank, in the background: they hold the moment they were asked for; any number of ranks reads them."""

import itertools
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import trainer.checkpoints
from schemas import PAD, storage
from schemas.errors import ExtremisError, StorageError
from schemas.layout import RunLayout
from tests.ranks import on_ranks
from tests.trainer.one_device import OneDevice
from trainer.checkpoints import (
    BackgroundWriter,
    Checkpoint,
    CheckpointContents,
    CheckpointWriter,
    ReadRows,
    RowSnapshot,
    latest_checkpoint,
    row_ranges,
    write_tensors,
)
from trainer.group import ALONE, Group, label_range

LABELS, D, A_FILE = 21, 3, 4


@given(data=st.data(), readers=st.integers(1, 3), held=st.sampled_from([0, 100, 1 << 20]), on_device=st.booleans())
def test_every_reader_of_a_snapshot_reads_what_was_there(
    data: st.DataObject, readers: int, held: int, on_device: bool
) -> None:
    """Whatever changed since, whether it is kept in memory or in the scratch file, and whoever came to read.

    A device has ids of rows with padding, or is sent them.
    """
    tensors = {"weight": torch.randn(LABELS, 2).bfloat16(), "square": torch.rand(LABELS)}
    before = {name: value.clone() for name, value in tensors.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.checkpoints, "_MAX_KEPT_BYTES", held)
        if on_device:
            patch.setattr(trainer.checkpoints, "CPU", None)  # any tensor is elsewhere
        snapshot = RowSnapshot(tensors)
        for read in [snapshot.reader() for _ in range(readers)]:
            edges = [0, *sorted(data.draw(st.sets(st.integers(1, LABELS - 1)))), LABELS]
            for start, stop in data.draw(st.permutations(list(itertools.pairwise(edges)))):
                for _ in range(data.draw(st.integers(0, 3))):
                    ids = np.asarray(data.draw(st.lists(st.integers(0, LABELS - 1), unique=True)), np.int64)
                    if on_device and data.draw(st.booleans()):
                        snapshot.keep(torch.from_numpy(np.append(ids, [PAD] * 3).astype(np.int32)))
                    else:
                        snapshot.keep(ids)
                    for value in tensors.values():
                        value[torch.from_numpy(ids)] += 1
                names = data.draw(st.sampled_from([("weight", "square"), ("weight",), ()]))
                rows = read(start, stop, *names)
                assert rows.keys() == set(names or tensors)
                for name, value in rows.items():
                    assert torch.equal(value, before[name][start:stop])
        kept = len(snapshot._kept)
        snapshot.keep(np.arange(LABELS))
        assert len(snapshot._kept) == kept  # nothing more when all has been read


@pytest.mark.parametrize("on_device", [False, True])
def test_what_a_snapshot_holds_in_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    if on_device:
        monkeypatch.setattr(trainer.checkpoints, "CPU", None)
    monkeypatch.setattr(trainer.checkpoints, "_MAX_KEPT_BYTES", 1 << 14)
    tensors = {"weight": torch.randn(4000, 16)}
    before, draw = tensors["weight"].clone(), np.random.default_rng(0)
    snapshot = RowSnapshot(tensors)
    read = snapshot.reader()
    for _ in range(60):
        ids = draw.choice(4000, 200, replace=False)
        snapshot.keep(ids)
        tensors["weight"][torch.from_numpy(ids)] = 0
        assert sum(piece.size for piece in snapshot._kept) <= (1000 if on_device else 600)
    assert torch.equal(read(0, 4000)["weight"], before)


def test_of_what_changes_on_a_device_nothing_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On `meta` a value that is asked for raises: what is kept goes away in copies that nobody waits for."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(trainer.checkpoints, "AsyncCopy", sent.append)
    tensors = {
        "weight": torch.zeros(100, 4, dtype=torch.bfloat16, device="meta"),
        "square": torch.zeros(100, device="meta"),
    }
    snapshot = RowSnapshot(tensors)
    snapshot.reader()
    with OneDevice():
        for ids in (torch.empty(30, dtype=torch.int32, device="meta"), np.arange(7)):
            snapshot.keep(ids)
    assert [(*copy.shape, copy.dtype, copy.device.type) for copy in sent] == [
        (*shape, dtype, "meta")
        for count in (30, 7)
        for shape, dtype in (((count,), torch.int64), ((count, 8), torch.uint8), ((count, 4), torch.uint8))
    ]


@contextmanager
def short_files() -> Iterator[None]:
    """Let no file of this process grow beyond 5,000 bytes, as on a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_scratch_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(trainer.checkpoints, "_MAX_KEPT_BYTES", 0)
    weight = torch.ones(5000, 8)
    snapshot = RowSnapshot({"weight": weight})
    read = snapshot.reader()
    words = "rows of labels that change while a dump or a checkpoint is written.*Set TMPDIR to a folder with more room"

    def change() -> None:
        for start in range(0, 5000, 100):
            snapshot.keep(np.arange(start, start + 100))
            weight[start : start + 100] = 0

    with short_files(), pytest.raises(StorageError, match=f"{tmp_path}: .*{words}"):
        change()
    assert (read(0, 5000)["weight"] == 1).all()  # what is being written is still what it was
    assert (weight == 0).any()


@given(labels=st.integers(0, 300), ranks=st.integers(1, 9), row_bytes=st.sampled_from([4, 16, 20, 64, 65, 1000]))
def test_files_end_at_the_same_labels_whoever_holds_them(labels: int, ranks: int, row_bytes: int) -> None:
    whole = row_ranges(0, labels, row_bytes)
    parts = [label_range(labels, rank, ranks) for rank in range(ranks)]
    cut = [files for start, stop in parts for files in row_ranges(start, stop, row_bytes)]
    assert [start for start, _ in cut] == [0, *(stop for _, stop in cut)][: len(cut)]
    assert {stop for _, stop in whole} | {stop for _, stop in parts if stop} == {stop for _, stop in cut}
    assert all((stop - start) * row_bytes <= max(trainer.checkpoints.FILE_BYTES, row_bytes) for start, stop in cut)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool]
)
def test_tensors_are_a_safetensors_file_of_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "odd": torch.arange(5).to(torch.uint8),
        "matrix": torch.randn(7, 3).to(dtype),
        "turned": torch.randn(3, 2).T,
        "none": torch.empty(0, 4),
        "number": torch.tensor(3.5),
    }
    shard = write_tensors(str(tmp_path), "x", tensors, rows=7)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value)
    assert shard.bytes == (tmp_path / "x.safetensors").stat().st_size


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with short_files(), pytest.raises(StorageError, match=r"x\.safetensors: File too large; free some space"):
        write_tensors(str(tmp_path), "x", {"weight": torch.zeros(5000)})
    assert list(tmp_path.iterdir()) == []


def values(labels: int = LABELS) -> dict[str, torch.Tensor]:
    rows = torch.arange(labels, dtype=torch.float32)
    return {"weight": rows[:, None] + torch.arange(D) / 10, "square": rows.sqrt()}


def contents(step: int, rows: dict[str, torch.Tensor], group: Group = ALONE) -> CheckpointContents:
    start, stop = label_range(len(rows["weight"]), group.rank, group.ranks)
    rank_rows = {name: value[start:stop].clone() for name, value in rows.items()}
    parts = {"encoder": {"bias": torch.full((2,), float(step))}}
    return CheckpointContents(step, parts, rank_rows, start, len(rows["weight"]), {"step": step}, {})


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.checkpoints, "FILE_BYTES", A_FILE * 4 * (D + 1))


class Gate:
    """Lets files of rows be written one at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turns = threading.Semaphore(0)
        self.written = 0
        write = trainer.checkpoints.write_rows

        def write_in_turn(*arguments: Any) -> Any:
            assert self._turns.acquire(timeout=20)
            self.written += 1
            return write(*arguments)

        monkeypatch.setattr(trainer.checkpoints, "write_rows", write_in_turn)

    def open(self, turns: int = 1) -> None:
        self._turns.release(turns)


def test_training_goes_on_while_a_checkpoint_of_its_moment_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, run, draw = Gate(monkeypatch), RunLayout(str(tmp_path)), np.random.default_rng(0)
    writer = CheckpointWriter(run)
    saved, expected = contents(3, values()), values()
    writer.save(saved)
    for _ in range(30):
        ids = draw.choice(LABELS, 4, replace=False)
        writer.before_change(ids)
        for value in saved.rows.values():
            value[torch.from_numpy(ids)] = -1.0
        saved.tensors["encoder"]["bias"] += 1
        if draw.random() < 0.15:
            gate.open()
    assert latest_checkpoint(run) is None or gate.written == 6
    gate.open(10)
    writer.wait()
    loaded = latest_checkpoint(run)
    assert loaded is not None
    for name, value in expected.items():
        assert torch.equal(loaded.vectors(name), value)
    assert loaded.tensors("encoder")["bias"].tolist() == [3, 3]
    assert any((value == -1).any() for value in saved.rows.values())


def test_a_checkpoint_that_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    for background in (True, False):
        writer = CheckpointWriter(RunLayout(str(tmp_path)), background=background)
        with pytest.raises(ExtremisError, match="could not"):
            save_and_change(writer)
        writer.close()


def save_and_change(writer: CheckpointWriter) -> None:
    writer.save(contents(1, values()))
    while True:
        writer.before_change(np.arange(3))


def test_jobs_of_a_step_run_in_order_and_a_failed_one_ends_those_after_it(tmp_path: Path) -> None:
    run, rows, turn = RunLayout(str(tmp_path)), values(), threading.Event()
    writer = CheckpointWriter(run)
    seen: list[torch.Tensor] = []

    def dump(read: ReadRows) -> None:
        assert turn.wait(20)
        seen.append(read(2, 9, "weight")["weight"])

    saved = replace(contents(3, values()), rows=rows)
    writer.begin(3, rows, dump)
    writer.save(saved)
    for value in rows.values():
        writer.before_change(np.arange(LABELS))
        value.fill_(-1)
    assert latest_checkpoint(run) is None  # a resume from it would miss the dump for ever
    turn.set()
    writer.save(contents(4, values()))  # of another step: waits for all before
    assert torch.equal(seen[0], values()["weight"][2:9])
    assert torch.equal(Checkpoint.open(run.checkpoint(3)).vectors("square"), values()["square"])
    writer.wait()

    def fail(_: ReadRows) -> None:
        assert turn.wait(20)
        raise StorageError("no room")

    turn.clear()
    writer.begin(5, rows, fail)
    writer.save(contents(5, values()))
    turn.set()
    with pytest.raises(StorageError, match="no room"):
        writer.wait()
    assert latest_checkpoint(run).state == {"step": 4}
    writer.begin(6, rows, dump)
    writer.wait()


def test_an_error_is_raised_while_a_table_of_the_dump_is_waited_for() -> None:
    writer = BackgroundWriter("dumps")
    writer.begin(1, {}, lambda _: storage.read_bytes("/nowhere/at/all"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        check_until_it_fails(writer)
    writer.check()


def check_until_it_fails(writer: BackgroundWriter) -> None:
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        writer.check()


def save_on(group: Group, root: str, background: bool) -> None:
    trainer.checkpoints.FILE_BYTES = A_FILE * 4 * (D + 1)
    writer = CheckpointWriter(RunLayout(root), keep=2, background=background, group=group)
    for step in (5, 9, 12):
        writer.save(contents(step, values(), group))
    writer.wait()


@pytest.mark.parametrize("background", [True, False])
def test_ranks_write_one_checkpoint_that_any_number_of_ranks_reads(tmp_path: Path, background: bool) -> None:
    on_ranks(3, save_on, str(tmp_path), background)
    run = RunLayout(str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.state == {"step": 12}
    for ranks in (1, 2, 3, 4, 7):
        for rank in range(ranks):
            start, stop = label_range(LABELS, rank, ranks)
            rank_rows = {name: torch.zeros_like(value[start:stop]) for name, value in values().items()}
            checkpoint.read_rows(rank_rows, start)
            assert all(torch.equal(rank_rows[name], value[start:stop]) for name, value in values().items())


def test_a_rank_reads_only_the_files_of_its_labels(tmp_path: Path) -> None:
    writer = CheckpointWriter(RunLayout(str(tmp_path)), background=False)
    writer.save(contents(1, values()))
    folder = tmp_path / "checkpoints" / "step-00000001"
    for first in (0, 4, 16, 20):
        (folder / f"vectors-{first:012d}.safetensors").unlink()
    checkpoint = Checkpoint.open(str(folder))
    rank_rows = {name: torch.zeros_like(value[9:16]) for name, value in values().items()}
    checkpoint.read_rows(rank_rows, 9)
    assert torch.equal(rank_rows["weight"], values()["weight"][9:16])


def test_what_a_killed_try_left_is_not_part_of_the_next(tmp_path: Path) -> None:
    run = RunLayout(str(tmp_path))
    CheckpointWriter(run, background=False).save(contents(1, values()))
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-00000001", folder / "step-00000002")
    (folder / "step-00000002" / "_manifest.json").unlink()
    (folder / "step-00000002" / "vectors-000000000007.safetensors").write_bytes(b"half of")
    CheckpointWriter(run, background=False).save(contents(2, values(9)))
    assert len(list((folder / "step-00000002").glob("vectors-*"))) == 3
    assert torch.equal(latest_checkpoint(run).vectors("weight"), values(9)["weight"])
