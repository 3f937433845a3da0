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
from tests.loop.test_kill import last_checkpoint, records, tables, wait_for_step
from tests.processes import wait_until_gone
from tests.ranks import launch

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
    """`torchrun -m extremis ARGUMENTS`, to its end."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    words = [sys.executable, "-m", *launcher, "-m", "extremis", *map(str, arguments)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def ended(processes: Iterable[subprocess.Popen[str]], seconds: float = 120) -> list[Done]:
    """How each process ended, which it has to do by itself."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=seconds)
        found.append(Done(process.returncode, out, err))
    return found


def close_to(run: Path, other: Path) -> None:
    """Both last checkpoints hold the same model, to float tolerance, whoever wrote them."""
    one, two = (together(place) for place in (run, other))
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, two[name], rtol=2e-2, atol=2e-3, err_msg=name)


def together(run: Path) -> dict[str, np.ndarray]:
    """Tensors of the newest checkpoint, label ranges laid end to end."""
    parts: dict[str, list[np.ndarray]] = {}
    for file in sorted(max((run / "checkpoints").glob("step-*")).glob("*.safetensors")):
        for name, value in load(file.read_bytes()).items():
            parts.setdefault(name if file.name.startswith("vectors") else f"{file.name}/{name}", []).append(value)
    return {name: np.concatenate(found) if len(found) > 1 else found[0] for name, found in parts.items()}


@pytest.fixture(scope="module")
def one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that is never stopped."""
    run = tmp_path_factory.mktemp("one") / "run"
    extremis("train", "astra", data, run, *CHOICES)
    return run


@pytest.fixture(scope="module")
def two(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks that is never stopped."""
    run = tmp_path_factory.mktemp("two") / "run"
    done = torchrun(2, "train", "astra", data, run, *CHOICES, "--json")
    assert done.status == 0, done.err
    assert [json.loads(line)["run"] for line in done.out.splitlines()] == [str(run)]  # rank 0 alone reports
    assert done.err.count("epoch 1 (2 of 2)") == 1
    return run


def test_two_ranks_under_torchrun_train_what_one_process_trains(one: Path, two: Path) -> None:
    close_to(two, one)
    ours, theirs = records(two), records(one)
    assert [(r["kind"], r["step"]) for r in ours] == [(r["kind"], r["step"]) for r in theirs]
    losses = [[r["loss"] for r in found if r["kind"] == "train"] for found in (ours, theirs)]
    np.testing.assert_allclose(*losses, rtol=1e-3)
    assert (two / "finished.json").read_bytes() == (one / "finished.json").read_bytes()


@pytest.mark.slow
def test_two_ranks_evaluate_what_one_process_evaluates(data: Path, two: Path) -> None:
    alone = call("evaluate", data, two, "--json").json
    together = torchrun(2, "evaluate", data, two, "--json")
    (found,) = [json.loads(line) for line in together.out.splitlines() if line.startswith("{")]
    assert found["metrics"] == pytest.approx(alone["metrics"], abs=0.6)  # a query of 200 that a rounding turns
    assert together.out.count("queries") == call("evaluate", data, two, "--json").out.count("queries")


def killed(data: Path, run: Path, ranks: int, victim: int, step: int, choices: list[str], verb: str = "train") -> None:
    """Train on `ranks` until `step` is done, kill one of them, and see the others end by themselves."""
    processes = launch(ranks, *command(verb, "astra", data, run, *choices, "--resume"), start_new_session=True)
    wait_for_step(processes[0], run, step)
    processes[victim].send_signal(signal.SIGKILL)
    done = ended(processes)
    assert done[victim].status == -signal.SIGKILL
    others = [end for rank, end in enumerate(done) if rank != victim]
    assert {end.status for end in others} == {1}, [end.err for end in others]
    told = [end for end in others if "error: " in end.err]
    assert len(told) == 1
    refused(told[0], "has lost another rank", "go on with --resume", status=1)
    for process in processes:
        wait_until_gone(process.pid)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_run_goes_on(
    data: Path, one: Path, two: Path, tmp_path: Path, victim: int
) -> None:
    run = tmp_path / "run"
    step = 6 + 7 * victim
    killed(data, run, 2, victim, step, CHOICES)
    if victim:
        assert torchrun(2, "train", "astra", data, run, *CHOICES, "--resume").status == 0
        assert last_checkpoint(run) == last_checkpoint(two)
        assert records(run) == records(two)
    else:
        extremis("train", "astra", data, run, *CHOICES, "--resume")
        close_to(run, one)


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
        if ranks == 3:
            ranks = 4  # divides the four streams
        processes = launch(ranks, *command("run", "astra", data, run, *MINED, "--resume"), start_new_session=True)
        wait_for_step(processes[0], run, step)
        time.sleep(draw.choice([0.0, draw.uniform(0, 1.0)]))
        for process in draw.sample(processes, draw.randint(1, ranks)):
            os.killpg(process.pid, signal.SIGKILL)
        ended(processes)
        for process in processes:
            wait_until_gone(process.pid)
    assert torchrun(2, "run", "astra", data, run, *MINED, "--resume").status == 0
    if seed == 2:
        close_to(run, whole)
    else:
        assert last_checkpoint(run) == last_checkpoint(whole)
        assert records(run) == records(whole)
        assert tables(run) == tables(whole)


@pytest.mark.slow
def test_what_cannot_be_is_told_once(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = ended(launch(2, *command("train", "astra", data, run, *CHOICES, "--set", "order.streams=1")))
    assert [end.status for end in done] == [2, 2]
    (told,) = [end for end in done if "error: " in end.err]
    refused(told, "2 ranks do not divide 1 canonical streams (order.streams)")
    assert not run.exists() or not (run / "config.toml").exists()


def test_half_an_environment_and_a_run_that_is_there_are_refused(
    data: Path, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(call("train", "astra", data, one, *CHOICES), "there is a run here already")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(call("train", "astra", data, tmp_path / "run", *CHOICES), "RANK = None, WORLD_SIZE = '2'", "torchrun")
