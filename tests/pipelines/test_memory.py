"""The memory of mining: the default by the process's share, kept with the tables; no block outlives its group."""

import gc
import json
import os
import resource
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import memory
from pipelines.memory import STEPS, with_memory
from pipelines.mine import MineOptions, mine
from pipelines.mining import search
from pipelines.options import ClusterOptions
from pipelines.runners import local
from schemas import process, storage
from schemas.storage import join
from tests.pipelines.mining.world import World, apart, random_world

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = random_world(str(tmp_path), rows=70, labels=90, dimension=6, shards=4)
    made.write_dump()
    return made


def contents(world: World) -> dict[str, bytes]:
    url = world.layout.negatives(5, "queries")
    return {name: storage.read_bytes(join(url, name)) for name in storage.list_names(url)}


@given(share=st.integers(0, 9 << 30), kind=st.sampled_from([MineOptions, ClusterOptions]), here=st.booleans())
def test_the_default_is_the_largest_step_that_fits(share: int, kind: type[MineOptions], here: bool) -> None:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "memory_share", lambda: share)
        chosen = with_memory(kind(), "memory://none", here, said.append).memory
        given = with_memory(kind(memory="3GiB"), "memory://none", here, said.append).memory
    assert chosen == max((step for step in STEPS if step <= share or not here), default=min(STEPS))
    assert given == 3 << 30
    assert len(said) == here * ((share < 4 << 30) + (share < 3 << 30))


def test_a_default_is_kept_for_a_resumed_run_and_later_tables(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that the user gave is not kept."""

    def mined(share: int, **options: object) -> int:
        monkeypatch.setattr(memory, "memory_share", lambda: share)
        mine(world.data, world.run, options=MineOptions(overwrite=True, **options))
        spent = storage.read_bytes(join(world.layout.negatives_root, "epoch-0005", "spent.json"))
        return int(json.loads(spent)["memory"])

    assert mined(8 << 30, memory=3 << 30) == 3 << 30
    storage.remove(join(world.layout.negatives_root, "epoch-0005"), recursive=True)
    assert mined(1500 * MIB) == 1 << 30
    for share in (8 << 30, 600 * MIB):
        storage.remove(join(world.layout.negatives_root, "epoch-0005"), recursive=True)
        assert mined(share) == 1 << 30


def test_fewer_workers_make_the_same_bytes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    options, tables = apart(world, MineOptions(block_rows=30)), []
    for free, fed in ((sys.maxsize, 3), (2 * options.memory, 2), (1, 1)):
        monkeypatch.setattr(local, "free_memory", lambda free=free: free)
        threads, said = ["--direct_num_workers=3", "--direct_running_mode=multi_threading"], list[str]()
        mine(world.data, world.run, options=options, beam_options=threads, progress=said.append)
        tables.append(contents(world))
        assert [line[0] for line in said if " of 3 workers: " in line] == [str(fed)] * (fed < 3)
        storage.remove(world.layout.negatives_root, recursive=True)
    assert tables == tables[:1] * 3


@pytest.mark.parametrize("index", ["exact", "IVF4,Flat"])
def test_no_block_outlives_its_group(world: World, monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    """Without the garbage collector, which may run late; a margin makes rows go deeper."""
    read, blocks = search.read_block, list[weakref.ref[np.ndarray]]()

    def read_alone(*arguments: object) -> np.ndarray:
        assert [block for block in blocks if block() is not None] == []
        block = read(*arguments)
        blocks.append(weakref.ref(block))
        return block

    monkeypatch.setattr(search, "read_block", read_alone)
    options = MineOptions(index=index, block_rows=30, target_recall=0.1, margin=0.3)
    gc.disable()
    try:
        mine(world.data, world.run, options=apart(world, options))
    finally:
        gc.enable()
    assert len(blocks) > 3


V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
V2 = "memory.max", "memory.current", "inactive_file"


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/a/b", "a/b", V2),
        ("0::/a/b", "a", V2),  # the limit is the parent's
        ("0::/of/the/host", "", V2),  # a container sees its own
        ("4:memory:/a", "memory/a", V1),
        ("4:memory:/of/the/host", "memory", V1),
    ],
)
def test_the_limits_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, folder: str, names: tuple[str, ...]
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"1:cpu:/b\n{line}\n")
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {2000 << 10} kB\nMemAvailable: {1600 << 10} kB\n")
    monkeypatch.setattr(process, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(process, "_CGROUP", tmp_path / "cgroup")
    assert (process.memory_share(), process.free_memory()) == (2000 * MIB, 1600 * MIB)
    (tmp_path / "cgroup" / folder).mkdir(parents=True)
    for name, text in zip([*names[:2], "memory.stat"], [700 * MIB, 300 * MIB, f"{names[2]} {50 * MIB}"], strict=True):
        (tmp_path / "cgroup" / folder / name).write_text(f"{text}\n")
    monkeypatch.setenv(process.RESERVED, str(100 * MIB))
    assert (process.memory_share(), process.free_memory()) == (600 * MIB, 450 * MIB)
    monkeypatch.undo()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 20, -1))  # `ulimit -v`
    assert process.memory_share() < MIB


def test_mine_in_a_cgroup(world: World) -> None:
    own = [line.split(":") for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line]
    cgroup = Path(f"/sys/fs/cgroup/memory{own[0][2] if own else ''}") / f"extremis-test-{os.getpid()}"
    try:
        cgroup.mkdir()
        (cgroup / "memory.limit_in_bytes").write_text(str(600 * MIB))
    except OSError as error:
        pytest.skip(f"no memory cgroup (version 1) can be made here: {error}")
    enter = f"echo $$ > {cgroup}/cgroup.procs; exec {sys.executable} -m extremis mine {world.data} {world.run}"
    try:
        done = subprocess.run(["sh", "-c", enter], capture_output=True, text=True, cwd=ROOT, check=False)
        peak = int((cgroup / "memory.max_usage_in_bytes").read_text())
    finally:
        cgroup.rmdir()
    assert done.returncode == 0, done.stderr
    assert "--memory 512.0MiB: this process may use 600.0 MiB" in done.stderr
    assert "of its 512.0 MiB, with" in done.stderr
    assert peak < 600 * MIB
