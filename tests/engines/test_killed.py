"""Processes that are killed with -9 in the middle of a job: what is published in the end is right all the same."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.command import command, environment, extremis
from tests.engines.clusters import Cluster, python_workers, started
from tests.engines.conftest import SMALL, files
from tests.engines.worker import SECONDS, process

pytestmark = pytest.mark.engine


def start_sharding(cluster: Cluster, raw: Path, data: Path, worker: Path) -> subprocess.Popen:
    """Start `extremis shard` on an engine; it is in its second pipeline, with workers."""
    start = command("shard", raw, data, *SMALL, "--", *process(cluster, worker))
    launcher = subprocess.Popen(start, env=environment(), stderr=subprocess.PIPE, text=True)
    assert launcher.stderr is not None
    assert any(line.startswith("sharding into") for line in launcher.stderr)
    limit = time.monotonic() + SECONDS
    while not python_workers(cluster):
        assert launcher.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.05)
    return launcher


def finish(launcher: subprocess.Popen) -> None:
    """Wait until the command has succeeded."""
    _, rest = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0, rest


def test_a_worker(flink: Cluster, raw: Path, sharded: Path, worker: Path, tmp_path: Path) -> None:
    """The engine does its work again."""
    data = tmp_path / "data"
    launcher = start_sharding(flink, raw, data, worker)
    os.kill(python_workers(flink)[0], signal.SIGKILL)
    finish(launcher)
    assert files(data) == files(sharded)


def test_a_task_manager(flink: Cluster, raw: Path, sharded: Path, worker: Path, tmp_path: Path) -> None:
    """Another takes its place."""
    data = tmp_path / "data"
    launcher = start_sharding(flink, raw, data, worker)
    flink.replace("taskmanager-0")
    finish(launcher)
    assert files(data) == files(sharded)


def test_an_executor(spark: Cluster, raw: Path, sharded: Path, worker: Path, tmp_path: Path) -> None:
    """Spark starts another."""
    data = tmp_path / "data"
    launcher = start_sharding(spark, raw, data, worker)
    os.kill(started(spark, "CoarseGrainedExecutorBackend")[0], signal.SIGKILL)
    finish(launcher)
    assert files(data) == files(sharded)


def test_a_launcher(flink: Cluster, raw: Path, sharded: Path, worker: Path, tmp_path: Path) -> None:
    """Its job goes on, and changes nothing of what the next run publishes."""
    data = tmp_path / "data"
    launcher = start_sharding(flink, raw, data, worker)
    launcher.kill()
    launcher.communicate()
    at_work = bool(python_workers(flink))
    extremis("shard", raw, data, *SMALL)
    limit = time.monotonic() + SECONDS
    while python_workers(flink):
        assert time.monotonic() < limit, "the job of a killed launcher goes on"
        time.sleep(0.5)
    assert at_work
    made = files(data)
    assert {name: content for name, content in made.items() if not name.startswith(".")} == files(sharded)
