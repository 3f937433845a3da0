"""The miner as a service: killed and started again, beside a trainer that is killed too, the run is the same run."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from schemas.layout import RunLayout
from tests.command import ROOT, command, environment, extremis
from tests.loop.test_kill import CHOICES, last_checkpoint, records, tables

QUIET = {"cwd": ROOT, "stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "start_new_session": True}


class Service:
    """A process that is started again whenever it was killed, as a cluster does it."""

    def __init__(self, *arguments: str | Path) -> None:
        self._command = command(*arguments)
        self.process = self._start()
        self.kills = 0

    def kill(self) -> None:
        """End it and all that it started, at once, and start it again."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.kills += self.process.wait() == -signal.SIGKILL
            self.process = self._start()

    def wait(self, seconds: float = 240) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _start(self) -> subprocess.Popen:
        return subprocess.Popen(self._command, env=environment(), **QUIET)


def disturbed(
    data: Path, run: Path, choices: list[str], seed: int, kills: int, watchers: int, seconds: float
) -> tuple[int, int]:
    """Train and mine as services of their own, kill one of them now and then: (kills of the trainer, of miners).

    `seconds`: what a run takes that nobody disturbs.
    """
    draw = random.Random(seed)
    trainer = Service("train", "astra", data, run, *choices, "--resume")
    miners = [Service("mine", data, run, "--watch") for _ in range(watchers)]
    try:
        for number in range(kills):
            # A process takes seconds to start: most moments are within its work, some before.
            until = time.monotonic() + draw.uniform(0.1, 0.3) * seconds
            while time.monotonic() < until and trainer.process.poll() is None:
                time.sleep(0.05)
            (trainer if number % 3 == 1 else draw.choice(miners)).kill()
        assert trainer.wait() == 0
        assert [miner.wait(60) for miner in miners] == [0] * watchers
    finally:
        for service in (trainer, *miners):
            service.end()
    return trainer.kills, sum(miner.kills for miner in miners)


def check_equal(run: Path, other: Path) -> None:
    assert records(run) == records(other)
    assert tables(run) == tables(other)
    assert last_checkpoint(run) == last_checkpoint(other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "kills", "watchers"),
    [(1, 2, 1), (2, 9, 2), (3, 9, 1)],
)
def test_miner_and_trainer_killed_apart(data: Path, tmp_path: Path, seed: int, kills: int, watchers: int) -> None:
    choices = CHOICES if kills > 2 else [*CHOICES, "--set", "train.epochs=3"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    began = time.monotonic()
    extremis("run", "astra", data, whole, *choices)
    of_trainer, of_miners = disturbed(data, run, choices, seed, kills, watchers, time.monotonic() - began)
    assert of_trainer + of_miners >= kills - 2
    assert of_trainer or of_miners
    check_equal(run, whole)
    assert not list(run.rglob(".c*")), "claims and candidates are gone"


@pytest.mark.slow
def test_the_same_decisions_give_the_same_model(data: Path, tmp_path: Path) -> None:
    """Nobody waits for a late table here, so what is adopted depends on the kills; a run that is told is equal."""
    choices = [word.replace("refresh.stale=wait", "refresh.stale=warn") for word in CHOICES]
    run, told = tmp_path / "run", tmp_path / "told"
    disturbed(data, run, choices, 5, 6, 1, seconds=12)
    for part in (RunLayout("").adoptions, RunLayout("").negatives_root):
        shutil.copytree(run / part, told / part)
    shutil.copy(run / RunLayout("").config, told / RunLayout("").config)
    extremis("train", "astra", data, told, *choices, "--resume")
    assert [r for r in records(told) if r["kind"] == "train"] == [r for r in records(run) if r["kind"] == "train"]
    assert last_checkpoint(told) == last_checkpoint(run)
