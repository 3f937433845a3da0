"""A trainer that is paused for longer than a lease: another one takes over, and the paused one writes nothing more."""

import time
from pathlib import Path

import pytest

from schemas.owners.claim import LEASE_SECONDS
from tests.command import extremis, sets
from tests.faults import paused
from tests.loop.test_kill import last_checkpoint, records, wait_for_step
from tests.loop.test_stop import start

CHOICES = sets("train.epochs=4", "logging.tensorboard=false", "refresh.start=9", "checkpoint.every_steps=5")


@pytest.mark.slow
def test_it_ends_and_the_run_is_the_other_s(data: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    extremis("train", "random", data, whole, *CHOICES)
    first = start("train", "random", data, run, *CHOICES)
    wait_for_step(first, run, 12)
    with paused(first.pid):
        began = time.monotonic()
        second = extremis("train", "random", data, run, *CHOICES, "--resume")
        assert time.monotonic() - began > LEASE_SECONDS
    _, said = first.communicate(timeout=60)
    assert first.returncode == 2, said
    assert "its claim is gone" in said or "taken over by process" in said
    assert f"taken over from process {first.pid}" in second.err
    assert f"process {first.pid}" in second.err.partition("waiting up to 30 seconds")[0]
    assert records(run) == records(whole)
    assert last_checkpoint(run) == last_checkpoint(whole)
    assert not list(run.glob(".claim*"))


@pytest.mark.slow
def test_a_second_trainer_is_told_who_the_first_is(data: Path, tmp_path: Path) -> None:
    long = [*CHOICES, "--set", "train.epochs=500"]
    first = start("train", "random", data, tmp_path / "run", *long)
    wait_for_step(first, tmp_path / "run", 3)
    done = extremis("train", "random", data, tmp_path / "run", *long, "--resume", check=False)
    first.kill()
    first.wait()
    assert done.status == 2, done.err
    assert f"{tmp_path / 'run'}: being trained by process {first.pid} on" in done.err
    assert "Let it finish, or end it" in done.err
