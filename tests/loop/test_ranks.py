"""`extremis train` and `extremis run` on several ranks: the real command line, a rank killed, resumed on any number."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from tests.command import ROOT, Done, call, command, environment, extremis, refused, sets
from tests.forks import start
from tests.loop.test_kill import last_checkpoint, records, tables, wait_for_step
from tests.owners import held_elsewhere
from tests.processes import wait_until_gone
from tests.ranks import free_port, launch

CHOICES = sets(
    "order.batch=128",
    "train.epochs=2",
    "refresh.start=2",
    "checkpoint.every_steps=4",
    "encoder.feature_dropout=0.3",
    "encoder.dropout=0.1",
    "validation.split=test",
    "logging.tensorboard=false",
)
MINED = sets("order.batch=128", "train.epochs=5", "refresh.every=1", "refresh.stale=wait", "checkpoint.every_steps=5")


def torchrun(ranks: int, *arguments: str | Path) -> Done:
    """Run `extremis ARGUMENTS` on several ranks to their end."""
    launcher = ["trainer.torchrun", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    words = [sys.executable, "-m", *launcher, "-m", "extremis", *map(str, arguments)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def wait_for_end(processes: Iterable[subprocess.Popen[str]], seconds: float = 120) -> list[Done]:
    """Wait until each process has ended by itself; return how it ended."""
    outcomes = []
    for process in processes:
        out, err = process.communicate(timeout=seconds)
        outcomes.append(Done(process.returncode, out, err))
    return outcomes


def assert_close(run: Path, other: Path) -> None:
    """Check that both last checkpoints hold the same model, to float tolerance."""
    single_rank, two_ranks = (together(place) for place in (run, other))
    assert single_rank.keys() == two_ranks.keys()
    for name, value in single_rank.items():
        np.testing.assert_allclose(value, two_ranks[name], rtol=2e-2, atol=2e-3, err_msg=name)


def together(run: Path) -> dict[str, np.ndarray]:
    """Return the tensors of the newest checkpoint, label ranges concatenated."""
    parts: dict[str, list[np.ndarray]] = {}
    for file in sorted(max((run / "checkpoints").glob("step-*")).glob("*.safetensors")):
        for name, value in load(file.read_bytes()).items():
            parts.setdefault(name if file.name.startswith("vectors") else f"{file.name}/{name}", []).append(value)
    return {name: np.concatenate(arrays) if len(arrays) > 1 else arrays[0] for name, arrays in parts.items()}


@pytest.fixture(scope="module")
def single_rank(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of one process that is never stopped."""
    run = tmp_path_factory.mktemp("one") / "run"
    assert call("train", "astra", data, run, *CHOICES).status == 0
    return run


@pytest.fixture(scope="module")
def two_ranks(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of two ranks that is never stopped, joined as by torchrun."""
    folder = tmp_path_factory.mktemp("two")
    joined = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("train", "astra", data, folder / "run", *CHOICES, "--json")
    ranks = [start(folder / f"rank-{rank}", *words, env={**joined, "RANK": str(rank)}) for rank in range(2)]
    for rank in ranks:
        rank.join()
    said = [(folder / f"rank-{rank}" / "err").read_text() for rank in range(2)]
    assert [rank.exitcode for rank in ranks] == [0, 0], said
    assert [(folder / f"rank-{rank}" / "out").read_text() == "" for rank in range(2)] == [False, True]
    assert "epoch 1 (2 of 2)" in said[0]
    assert "epoch" not in said[1]
    return folder / "run"


def test_two_ranks_train_what_one_process_trains(single_rank: Path, two_ranks: Path) -> None:
    assert_close(two_ranks, single_rank)
    records_of_two, records_of_one = records(two_ranks), records(single_rank)
    assert [(r["kind"], r["step"]) for r in records_of_two] == [(r["kind"], r["step"]) for r in records_of_one]
    losses = [
        [r["loss"] for r in run_records if r["kind"] == "train"] for run_records in (records_of_two, records_of_one)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-3)
    assert (two_ranks / "finished.json").read_bytes() == (single_rank / "finished.json").read_bytes()


@pytest.mark.slow
def test_two_ranks_evaluate_what_one_process_evaluates(data: Path, two_ranks: Path) -> None:
    alone = call("evaluate", data, two_ranks, "--json").json
    together = torchrun(2, "evaluate", data, two_ranks, "--json")
    (report,) = [json.loads(line) for line in together.out.splitlines() if line.startswith("{")]
    assert report["metrics"] == pytest.approx(alone["metrics"], abs=0.6)  # a query of 200 that a rounding turns
    assert together.out.count("queries") == call("evaluate", data, two_ranks, "--json").out.count("queries")


def killed(data: Path, run: Path, ranks: int, victim: int, step: int, choices: list[str], verb: str = "train") -> None:
    """Train on `ranks` until `step` is done, kill one of them, and see the others end by themselves."""
    processes = launch(ranks, *command(verb, "astra", data, run, *choices, "--resume"), start_new_session=True)
    wait_for_step(processes[0], run, step)
    processes[victim].send_signal(signal.SIGKILL)
    done = wait_for_end(processes)
    assert done[victim].status == -signal.SIGKILL
    others = [end for rank, end in enumerate(done) if rank != victim]
    assert {end.status for end in others} == {3}, [end.err for end in others]
    told = [end for end in others if "error: " in end.err]
    assert len(told) == 1
    refused(told[0], "lost another rank", "Continue with --resume", status=3)
    for process in processes:
        wait_until_gone(process.pid)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_run_goes_on(
    data: Path, single_rank: Path, two_ranks: Path, tmp_path: Path, victim: int
) -> None:
    run = tmp_path / "run"
    step = 6 + 7 * victim
    killed(data, run, 2, victim, step, CHOICES)
    if victim:
        assert torchrun(2, "train", "astra", data, run, *CHOICES, "--resume").status == 0
        assert last_checkpoint(run) == last_checkpoint(two_ranks)
        assert records(run) == records(two_ranks)
    else:
        extremis("train", "astra", data, run, *CHOICES, "--resume")
        assert_close(run, single_rank)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_ranks_trainer_and_miner_killed_at_random_moments(data: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert torchrun(2, "run", "astra", data, whole, *MINED).status == 0
    total = max(record["step"] for record in records(whole))
    moments = sorted(draw.sample(range(1, total), 4))
    for step in moments:
        ranks = draw.choice([2, 2, 3 if seed == 2 else 2])
        processes = launch(ranks, *command("run", "astra", data, run, *MINED, "--resume"), start_new_session=True)
        wait_for_step(processes[0], run, step)
        time.sleep(draw.choice([0.0, draw.uniform(0, 1.0)]))
        for process in draw.sample(processes, draw.randint(1, ranks)):
            os.killpg(process.pid, signal.SIGKILL)
        wait_for_end(processes, 400)  # a rank that was killed before all met is waited for, 300 s
        for process in processes:
            wait_until_gone(process.pid)
    assert torchrun(2, "run", "astra", data, run, *MINED, "--resume").status == 0
    if seed == 2:
        assert_close(run, whole)
    else:
        assert last_checkpoint(run) == last_checkpoint(whole)
        assert records(run) == records(whole)
        assert tables(run) == tables(whole)


@pytest.mark.slow
def test_what_cannot_be_is_told_once(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = wait_for_end(launch(2, *command("train", "astra", data, run, *CHOICES, "--set", "order.streams=1")))
    assert [end.status for end in done] == [2, 2]
    (told,) = [end for end in done if "error: " in end.err]
    refused(told, "order.streams = 1 is less than the number of ranks, 2")
    assert not run.exists() or not (run / "config.toml").exists()


def test_half_an_environment_and_a_run_that_is_there_are_refused(
    data: Path, single_rank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(call("train", "astra", data, single_rank, *CHOICES), "a run exists here already")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(call("train", "astra", data, tmp_path / "run", *CHOICES), "RANK = None, WORLD_SIZE = '2'", "torchrun")


@pytest.mark.slow
def test_a_run_of_another_process_is_refused_once_by_all_ranks(data: Path, tmp_path: Path) -> None:
    with held_elsewhere(str(tmp_path / "run"), "trained"):
        done = torchrun(2, "train", "random", data, tmp_path / "run", *CHOICES)
    assert done.status == 5, done.err
    told = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, done.err
    assert "being trained by process" in told[0]
    assert not (tmp_path / "run").exists()
