"""Processes that are killed with -9 in the middle of a job: what is published in the end is right all the same."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.command import command, environment, extremis
from tests.engines.clusters import Cluster, running_jobs, started
from tests.engines.conftest import SMALL, files
from tests.engines.worker import NO_CHECK, SECONDS, process

pytestmark = pytest.mark.engine


def start_sharding(cluster: Cluster, raw: Path, data: Path, worker: Path) -> tuple[subprocess.Popen, int]:
    """Start `extremis shard` on an engine; it is in its second pipeline, and the process with this number at work."""
    flags = [*process(cluster, worker), *NO_CHECK]
    start = command("shard", raw, data, *SMALL, "--", *flags)
    launcher = subprocess.Popen(start, env=environment(), stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + SECONDS
    while True:
        assert launcher.poll() is None, launcher.stderr and launcher.stderr.read()
        assert time.monotonic() < limit
        with contextlib.suppress(FileNotFoundError):  # staging is cleared meanwhile
            for counts in data.rglob("progress/*.json"):  # HOST-PROCESS.json
                if '"tokenize"' in counts.read_text():
                    return launcher, int(counts.stem.rpartition("-")[2])
        time.sleep(0.05)


def finish(launcher: subprocess.Popen) -> None:
    """Wait until the command has succeeded."""
    _, rest = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0, rest


@pytest.mark.slow
def test_a_worker(flink: Cluster, raw: Path, sharded: Path, worker: Path, tmp_path: Path) -> None:
    """The engine does its work again."""
    data = tmp_path / "data"
    launcher, pid = start_sharding(flink, raw, data, worker)
    os.kill(pid, signal.SIGKILL)
    finish(launcher)
    assert files(data) == files(sharded)


def test_a_task_manager(flink: Cluster, raw: Path, sharded: Path, worker: Path, tmp_path: Path) -> None:
    """Another takes its place."""
    data = tmp_path / "data"
    launcher, _ = start_sharding(flink, raw, data, worker)
    flink.replace("taskmanager-0")
    finish(launcher)
    assert files(data) == files(sharded)


@pytest.mark.slow
def test_an_executor(spark: Cluster, raw: Path, sharded: Path, worker: Path, tmp_path: Path) -> None:
    """Spark starts another."""
    data = tmp_path / "data"
    launcher, _ = start_sharding(spark, raw, data, worker)
    os.kill(started(spark, "CoarseGrainedExecutorBackend")[0], signal.SIGKILL)
    finish(launcher)
    assert files(data) == files(sharded)


def test_a_launcher(flink: Cluster, raw: Path, sharded: Path, worker: Path, tmp_path: Path) -> None:
    """Its job goes on, and changes nothing of what the next run publishes."""
    data = tmp_path / "data"
    launcher, _ = start_sharding(flink, raw, data, worker)
    launcher.kill()
    launcher.communicate()
    assert running_jobs(flink) == 1
    extremis("shard", raw, data, *SMALL)
    limit = time.monotonic() + SECONDS
    while running_jobs(flink):
        assert time.monotonic() < limit, "the job of a killed launcher goes on"
        time.sleep(0.5)
    made = {name: content for name, content in files(data).items() if not name.startswith(".")}
    assert made == files(sharded)
