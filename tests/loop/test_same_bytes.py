"""The same input gives the same bytes: on every runner, on every run, and after a run that was killed at any moment."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipelines.embed import EmbedOptions, embed
from pipelines.mine import MineOptions, mine
from pipelines.shard import ShardOptions, shard
from schemas.layout import MINING_COST
from tests.command import PROCESSES, ROOT, call, command, environment, sets
from tests.pipelines.mining.world import World, random_world
from tests.pipelines.raw import write_tate
from tests.processes import wait_until_gone

Flags = tuple[str, ...]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` by its path, but for what a clock measured."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MINING_COST]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write XC raw files with filters of both splits and a few rejected lines."""
    raw = write_tate(tmp_path_factory.mktemp("same") / "raw", 1000, 100)
    (raw / "trn_filter_labels.txt").write_text("0 1\n5 2\n999 3\n")
    (raw / "tst_filter_labels.txt").write_text("3 17\n")
    return raw


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Write a dump of two sources, of a few shards and blocks."""
    root = str(tmp_path_factory.mktemp("same") / "world")
    world = random_world(root, 300, 400, 16, shards=5, row_group_rows=16, width=9, with_labels=True)
    world.write_dump()
    return world


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("same") / "run"
    assert call("train", "random", data, run, *sets("train.epochs=1")).status == 0
    return run


SHARD = ShardOptions(tokenizer="train:800", shards=5, row_group_rows=64, keep_text=True, validation_share=0.1)


def make_shards(source: Path, out: Path, flags: Flags) -> None:
    shard(str(source), str(out), SHARD, flags)


def make_tables(world: World, out: Path, flags: Flags) -> None:
    shutil.copytree(world.run, out)
    options = MineOptions(block_rows=100, index="IVF16,Flat", nprobe=2, target_recall=0.4, tasks_per_block=2, threads=1)
    mine(world.data, str(out), options=options, beam_options=flags)


def make_embeddings(data: Path, run: Path, out: Path, flags: Flags) -> None:
    embed(str(data), str(run), str(out), EmbedOptions(split="train"), flags)


@pytest.fixture(scope="module")
def make(source: Path, world: World, data: Path, trained: Path) -> dict[str, Callable[[Path, Flags], None]]:
    """Return the function that makes each kind of table at a place with Beam options."""
    return {
        "shard": lambda out, flags: make_shards(source, out, flags),
        "mine": lambda out, flags: make_tables(world, out, flags),
        "embed": lambda out, flags: make_embeddings(data, trained, out, flags),
    }


@pytest.fixture(scope="module")
def reference(
    make: dict[str, Callable[[Path, Flags], None]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, bytes]]:
    """Files that one run in this process makes."""
    contents_of = {}
    for number, (name, step) in enumerate(make.items()):
        out = tmp_path_factory.mktemp("reference") / str(number)
        step(out, ())
        contents_of[name] = contents(out)
    return contents_of


@pytest.mark.parametrize("flags", ["in process", "two processes"], indirect=True)
@pytest.mark.parametrize("kind", ["shard", "mine", pytest.param("embed", marks=pytest.mark.slow)])
def test_on_every_runner(
    kind: str,
    flags: Flags,
    make: dict[str, Callable[[Path, Flags], None]],
    reference: dict[str, dict[str, bytes]],
    tmp_path: Path,
) -> None:
    make[kind](tmp_path / "out", flags)
    files = contents(tmp_path / "out")
    assert files.keys() == reference[kind].keys()
    assert {name for name, content in files.items() if content != reference[kind][name]} == set()


def test_there_is_something_to_compare(reference: dict[str, dict[str, bytes]]) -> None:
    parts = {kind: [name for name in files if name.endswith(".parquet")] for kind, files in reference.items()}
    assert len(parts["shard"]) == 3 * 5 + 1
    assert sum(name.startswith("negatives") for name in parts["mine"]) == 2 * 5
    assert len(parts["embed"]) == 4


def start(arguments: Sequence[str | Path]) -> subprocess.Popen:
    return subprocess.Popen(
        command(*arguments),
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen, mark: Path) -> None:
    """Wait until the process has begun its work, of which `mark` is the first trace, or has ended."""
    limit = time.monotonic() + 60
    while process.poll() is None and not mark.exists():
        assert time.monotonic() < limit
        time.sleep(0.005)


def assert_killed_runs_end_the_same(
    arguments: Sequence[str | Path], out: Path, mark: str, seed: int, kills: int, victim: str
) -> None:
    """Kill a command at random moments, run it again, and compare with the bytes of an undisturbed run.

    All that is visible after a kill has to be complete.
    """
    before = shutil.copytree(out, out.with_name("before")) if out.exists() else None
    process = start(arguments)
    wait_for(process, out / mark)
    began = time.monotonic()
    assert process.wait() == 0
    seconds = time.monotonic() - began
    whole = contents(out)
    shutil.rmtree(out)
    if before is not None:
        shutil.copytree(before, out)
    draw = random.Random(seed)
    moments = []
    for _ in range(kills):
        process = start(arguments)
        wait_for(process, out / mark)
        moments.append(draw.uniform(0, seconds))
        try:
            process.wait(moments[-1])
        except subprocess.TimeoutExpired:
            process.kill() if victim == "launching process" else os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_until_gone(process.pid)
        for manifest in out.rglob("_manifest.json"):
            refused_or_whole = call("inspect", manifest.parent, "--verify", "--rows", "0")
            assert refused_or_whole.status == 0, refused_or_whole.err
    assert start(arguments).wait() == 0
    again = contents(out)
    assert again.keys() == whole.keys()
    assert {name for name in whole if again[name] != whole[name]} == set(), f"killed after {moments}"


@pytest.mark.parametrize(
    ("seed", "kills", "flags", "victim"),
    [
        pytest.param(1, 1, (), "all", marks=pytest.mark.slow),
        pytest.param(2, 6, PROCESSES, "launching process", marks=pytest.mark.slow),
        pytest.param(3, 8, (), "all", marks=pytest.mark.slow),
    ],
)
def test_a_sharding_run_that_is_killed(
    source: Path, tmp_path: Path, seed: int, kills: int, flags: Flags, victim: str
) -> None:
    out = tmp_path / "data"
    arguments = ["shard", source, out, "--tokenizer", "train:800", "--shards", "5", "--row-group-rows", "64"]
    assert_killed_runs_end_the_same([*arguments, "--", *flags], out, ".staging", seed, kills, victim)


@pytest.mark.parametrize(
    ("seed", "kills", "flags", "victim"),
    [
        pytest.param(1, 2, PROCESSES, "launching process", marks=pytest.mark.slow),
        pytest.param(2, 6, (), "all", marks=pytest.mark.slow),
        pytest.param(3, 6, PROCESSES, "all", marks=pytest.mark.slow),
    ],
)
def test_a_mining_run_that_is_killed(
    world: World, tmp_path: Path, seed: int, kills: int, flags: Flags, victim: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(world.run, out)
    arguments = ["mine", world.data, out, "--block-rows", "100", "--index", "IVF8,Flat"]
    assert_killed_runs_end_the_same([*arguments, "--", *flags], out, "negatives", seed, kills, victim)
