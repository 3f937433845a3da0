"""`python -m benchmarks.rehearsal`: against ranks that are real, against what it writes, and against bad input."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.rehearsal import rank_stages, synthetic_tables, worker_stages
from benchmarks.rehearsal.__main__ import main
from benchmarks.rehearsal.faked_ranks import FakedRanks
from benchmarks.rehearsal.rehearse import Rehearsal, rehearse
from benchmarks.rehearsal.stage import Stage, Task
from benchmarks.two_ranks import tcp_bytes
from extremis.planning import Workload, estimate
from schemas.errors import InputError
from tests.command import ROOT, environment
from tests.ranks import on_ranks
from trainer.group import Group
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe

RECIPE = {
    "method": "astra",
    "encoder": {"dimension": 64, "ngrams": 2, "buckets": 4096, "lr": 0.05},
    "classifier": {"lr": 0.05, "bias": True},
    "negatives": {"pool": "own", "random": 40, "hard": 10},
    "order": {"batch": 256},
    "refresh": {"start": 2, "every": 1},
    "train": {"epochs": 3},
    "logging": {"tensorboard": False},
}
STEPS = 12  # that are counted of a run


def workload(**changes: Any) -> Workload:
    sizes = {"queries": 20_000, "labels": 3_000, "tokens": 9.0, "vocabulary": 2000, "ranks": 2}
    return Workload(recipe=Recipe.model_validate(RECIPE), **{**sizes, **changes})


def rehearsal(folder: Path, minutes: float = 0.01, **changes: Any) -> Rehearsal:
    return Rehearsal(workload(**changes), minutes=minutes, folder=str(folder))


def task(folder: Path, rank: int, ranks: int) -> Task:
    work = rehearsal(folder, ranks=ranks)
    return Task(str(folder), work.sizes(20_000), 1.0, work.workload.recipe, rank, ranks)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    synthetic_tables.write_data(str(folder), rehearsal(folder).sizes(20_000), linked=False)
    return str(folder)


class Enough(Exception):
    pass


def sent(group: Group, data: str, run: str) -> float:
    """Return the bytes that a rank sends a step, of some."""
    counts: list[float] = []

    def count(step: int, total: int, loss: float) -> None:
        group.barrier()
        counts.append(group.sent if isinstance(group, FakedRanks) else tcp_bytes()[0])
        if len(counts) == STEPS:
            raise Enough

    with contextlib.suppress(Enough):
        next(Trainer.start(data, run, Recipe.model_validate(RECIPE), print, group).train(count))
    return float(np.median(np.diff(counts[2:])))


@pytest.mark.slow
def test_faked_peers_are_sent_what_real_ones_are(data: str, tmp_path: Path) -> None:
    """Bytes of TCP, as the kernel counts them, have headers besides."""
    real = on_ranks(2, sent, data, str(tmp_path / "real"))
    group = FakedRanks(1, 2)
    try:
        faked = sent(group, data, str(tmp_path / "faked"))
    finally:
        group.close()
    assert real[1] == pytest.approx(faked, rel=0.05)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_bytes_are_those_that_are_planned(tmp_path: Path, rank: int, ranks: int) -> None:
    rank_stages.make_tables(task(tmp_path, rank, ranks))
    stages = {stage.name: stage for stage in rank_stages.train(task(tmp_path, rank, ranks))}
    planned = estimate(workload(ranks=ranks))
    own = planned.tables["checkpoint"].bytes - (1 - 1 / ranks) * 3_000 * 66 * 4
    assert stages["checkpoint"].storage == pytest.approx(own, rel=0.05)
    assert stages["resume"].storage == pytest.approx(own, rel=0.05)
    dumped = sum(size.bytes for name, size in planned.tables.items() if name.startswith(("embeddings", "vectors")))
    assert stages["dump"].storage == pytest.approx(dumped / ranks, rel=0.25)  # by whole shards, of which there are few
    assert (stages["step"].network is None) == (ranks == 1)
    assert all(stage.seconds > 0 for stage in stages.values())


def test_workers_write_what_is_planned(tmp_path: Path) -> None:
    work = rehearsal(tmp_path)
    of_worker = Task(str(tmp_path), work.sizes(work.workload.rows), 1.0)
    (sharded,) = worker_stages.shard(of_worker)
    worker_stages.make_dump(of_worker)
    block, merge = worker_stages.mine(of_worker)
    tables = work.planned.tables
    assert sharded.storage == pytest.approx(tables["queries"].bytes + tables["labels"].bytes, rel=0.4)
    assert block.storage == pytest.approx(tables["vectors"].bytes, rel=0.05)
    assert merge.storage == pytest.approx(sum(t.bytes for n, t in tables.items() if n[:3] == "neg"), rel=0.3)
    assert block.seconds > 0 < sharded.seconds


def test_limits_and_sums_follow_from_the_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of stages that take a second: steps count most, a thread's work only beyond a step's, a slow network for its."""
    names = {"shard": "shard", "step": "train", "stream": "train", "dump": "train", "block": "mine", "merge": "mine"}

    def faked(run: Any, task: Task) -> list[Stage]:
        return [Stage(step, name, 1.0, network=1e6) for name, step in names.items() if run.__name__ == step]

    monkeypatch.setattr("benchmarks.rehearsal.rehearse.run_in_process", faked)
    work = rehearsal(tmp_path)
    quick = rehearse(work, print)
    steps = work.workload.steps
    assert quick["seconds"] == {"shard": 1.0, "mine": 2.0 * work.workload.dumps, "train": steps + work.workload.dumps}
    assert quick["limits"][0] == "the processor (step)"
    slow = rehearse(Rehearsal(work.workload, network=1e5, folder=str(tmp_path)), print)
    assert slow["limits"][0] == "the network (step)"
    assert slow["seconds"]["train"] == 10 * quick["seconds"]["train"]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "2", "--rank", "2"), ("--rank 2", "--ranks 2")),
        (("--network", "10 apples"), ("10 apples", "10Gbit")),
        (("--network", "0Gbit"), ("0Gbit", "10Gbit")),
        (("--disk", "fast"), ("fast",)),
        (("--recipe", "ngame"), ("clusters",)),
    ],
)
def test_bad_input_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--queries", "1e6", "--labels", "1e5", "--folder", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert all(word in str(ended.value) for word in words)
    assert not [*tmp_path.iterdir()]


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.sizes.free_memory", lambda: 1 << 20)
    with pytest.raises(InputError, match=r"rank 0 of 2 needs .* and 1.0 MiB are free. Plan with more --ranks"):
        rehearse(rehearsal(tmp_path), print)
    monkeypatch.setattr("trainer.sizes.free_memory", lambda: 1 << 50)
    monkeypatch.setattr("schemas.storage.free_bytes", lambda url: 1 << 20)
    with pytest.raises(InputError, match="Give another --folder"):
        rehearse(rehearsal(tmp_path), print)


@pytest.mark.slow
def test_a_rehearsal_prints_its_stages_and_leaves_nothing(tmp_path: Path) -> None:
    arguments = ("--queries", "20e3", "--labels", "2e3", "--ranks", "2", "--rank", "1", "--minutes", "0.05")
    command = [sys.executable, "-m", "benchmarks.rehearsal", *arguments, "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment({}), stdout=subprocess.PIPE, text=True, check=True)
    body = json.loads(done.stdout.splitlines()[-1])
    names = [stage["name"] for stage in body["stages"]]
    assert {"shard", "stream", "plan", "step", "checkpoint", "resume", "dump", "adoption", "block", "merge"} < {*names}
    assert body["seconds"].keys() == {"shard", "mine", "train"}
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_rehearsal_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.rehearsal", "--queries", "1e6", "--labels", "1e5"]
    process = subprocess.Popen([*command, "--folder", str(tmp_path)], cwd=ROOT, env=environment({}))
    for _ in itertools.takewhile(lambda _: not [*tmp_path.glob("*/raw-*")], range(600)):
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for _ in itertools.takewhile(lambda _: [*tmp_path.iterdir()], range(100)):
        time.sleep(0.1)
    assert not [*tmp_path.iterdir()]
