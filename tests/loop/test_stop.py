"""SIGTERM, as preempted machines send it, SIGHUP, as a closed terminal does, and Ctrl-C: a checkpoint is saved first.

The run goes on from it to the same end. SIGSTOP: after a lease the run is that of another trainer.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from schemas.owners import LEASE_SECONDS
from tests.command import ROOT, call, command, environment, extremis, sets
from tests.faults import paused
from tests.loop.test_kill import last_checkpoint, records, wait_for_step

CHOICES = sets("train.epochs=3", "logging.tensorboard=false", "refresh.start=9", "checkpoint.every_epochs=0")
PAUSED_CHOICES = sets("train.epochs=4", "logging.tensorboard=false", "refresh.start=9", "checkpoint.every_steps=5")


def launch(words: list[str], **streams: Any) -> subprocess.Popen[str]:
    """Start a process that hears signals, although these tests may have been started under nohup, or behind a shell."""
    hear = lambda: [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGINT)]  # noqa: E731
    return subprocess.Popen(words, env=environment(), cwd=ROOT, text=True, preexec_fn=hear, **streams)


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return launch(command(*arguments), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)


_WAIT = """
from extremis.stopping import stopping_on_signal
with stopping_on_signal(30) as asked:
    print("ready", flush=True)
    print(asked.wait(5), flush=True)
"""


@pytest.mark.parametrize(
    ("number", "prefix", "heard"),
    [
        (signal.SIGTERM, [], True),
        (signal.SIGHUP, [], True),
        (signal.SIGHUP, ["nohup"], False),
        (signal.SIGINT, [], True),
    ],
)
def test_a_signal_is_heard_unless_nohup_ignores_it(number: int, prefix: list[str], heard: bool) -> None:
    command = [*prefix, sys.executable, "-c", _WAIT]
    with launch(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        if not heard:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "True\n"


_LATE = """
import os, time
from extremis.stopping import stopping_on_signal
with stopping_on_signal(0.2):
    for number in numbers:
        os.kill(os.getpid(), number)
    time.sleep(5)
"""


@pytest.mark.parametrize(
    ("numbers", "status", "said"),
    [
        ([15], 143, "no checkpoint was saved within grace=0.2 s"),
        ([15, 15], 143, "no checkpoint was saved before a second signal"),
        ([2, 2], -2, "a second Ctrl-C ends the run without it"),
    ],
)
def test_a_run_without_time_for_a_checkpoint_says_so(numbers: list[int], status: int, said: str) -> None:
    with launch([sys.executable, "-c", f"numbers = {numbers}{_LATE}"], stderr=subprocess.PIPE) as process:
        assert said in process.communicate(timeout=60)[1]
        assert process.returncode == status


def test_a_checkpoint_is_saved_and_the_run_goes_on_from_it(data: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert call("train", "random", data, whole, *CHOICES).status == 0
    trainer = start("train", "random", data, run, *CHOICES)
    wait_for_step(trainer, run, 20)
    trainer.send_signal(signal.SIGHUP)
    _, said = trainer.communicate(timeout=60)
    assert trainer.returncode == 143, said
    assert "stopped by a signal after step" in said
    assert "Continue with --resume" in said
    steps = [int(place.name.removeprefix("step-")) for place in (run / "checkpoints").iterdir()]
    assert len(steps) == 1
    assert steps[0] == records(run)[-1]["step"] >= 20
    assert not list(run.glob(".claim*"))
    assert call("train", "random", data, run, *CHOICES, "--resume").status == 0
    assert records(run) == records(whole)
    assert last_checkpoint(run) == last_checkpoint(whole)


@pytest.mark.slow
def test_without_grace_it_ends_at_once(data: Path, tmp_path: Path) -> None:
    trainer = start("train", "random", data, tmp_path / "run", *CHOICES, "--grace", "0")
    wait_for_step(trainer, tmp_path / "run", 3)
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(30) == -signal.SIGTERM
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_run_that_waits_for_a_table_stops_too(data: Path, tmp_path: Path) -> None:
    """It says for what it waits, since when and until when; no miner runs here."""
    choices = sets("train.epochs=3", "refresh.stale=wait", "logging.tensorboard=false", "refresh.source=table")
    trainer = start("train", "astra", data, tmp_path / "run", *choices)
    assert trainer.stderr is not None
    limit = time.monotonic() + 120
    while "waiting for the hard-negative table due at epoch 2 since" not in (line := trainer.stderr.readline()):
        assert time.monotonic() < limit
        assert trainer.poll() is None
    assert "at the latest (refresh.wait_seconds)" in line
    trainer.send_signal(signal.SIGTERM)
    _, said = trainer.communicate(timeout=60)
    assert trainer.returncode == 143, said
    assert "Continue with --resume" in said


@pytest.mark.slow
def test_a_paused_trainer_ends_and_the_run_is_the_other_s(data: Path, tmp_path: Path) -> None:
    """It is paused for longer than a lease: another one takes over, and the paused one writes nothing more."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert call("train", "random", data, whole, *PAUSED_CHOICES).status == 0
    first = start("train", "random", data, run, *PAUSED_CHOICES)
    wait_for_step(first, run, 12)
    with paused(first.pid):
        began = time.monotonic()
        second = extremis("train", "random", data, run, *PAUSED_CHOICES, "--resume")
        assert time.monotonic() - began > LEASE_SECONDS
    _, said = first.communicate(timeout=60)
    assert first.returncode == 5, said
    assert "its claim is gone" in said or "taken over by process" in said
    assert f"taken over from process {first.pid}" in second.err
    assert f"process {first.pid}" in second.err.partition("waiting up to 30 seconds")[0]
    assert records(run) == records(whole)
    assert last_checkpoint(run) == last_checkpoint(whole)
    assert not list(run.glob(".claim*"))


@pytest.mark.slow
def test_a_second_trainer_is_told_who_the_first_is(data: Path, tmp_path: Path) -> None:
    long = [*PAUSED_CHOICES, "--set", "train.epochs=500"]
    first = start("train", "random", data, tmp_path / "run", *long)
    wait_for_step(first, tmp_path / "run", 3)
    done = extremis("train", "random", data, tmp_path / "run", *long, "--resume", check=False)
    first.kill()
    first.wait()
    assert done.status == 5, done.err
    assert f"{tmp_path / 'run'}: being trained by process {first.pid} on" in done.err
    assert "Wait until that process has finished, or end it" in done.err
