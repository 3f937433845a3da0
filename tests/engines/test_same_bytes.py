"""Every engine and environment makes the bytes that this process makes, also when a worker is killed on the way."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.command import command, environment, extremis
from tests.engines.clusters import Cluster, python_workers
from tests.engines.conftest import SMALL
from tests.engines.worker import loopback, process

pytestmark = pytest.mark.engine

ENGINES = pytest.mark.parametrize("cluster", ["flink", "spark"], indirect=True)
ENVIRONMENTS = pytest.mark.parametrize("kind", ["LOOPBACK", "PROCESS"])


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Cluster:
    return request.getfixturevalue(request.param)


@pytest.fixture
def flags(cluster: Cluster, kind: str, worker: Path) -> list[str]:
    return loopback(cluster) if kind == "LOOPBACK" else process(cluster, worker)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@ENGINES
@ENVIRONMENTS
def test_shard(flags: list[str], raw: Path, sharded: Path, tmp_path: Path) -> None:
    """From relative paths, too."""
    done = extremis("shard", os.path.relpath(raw, tmp_path), "data", *SMALL, "--", *flags, cwd=tmp_path)
    assert "workers answered" in done.err
    assert files(tmp_path / "data") == files(sharded)


@ENGINES
@ENVIRONMENTS
def test_mine(flags: list[str], sharded: Path, trained: Path, tmp_path: Path) -> None:
    extremis("mine", sharded, trained, "--out", tmp_path / "here")
    extremis("mine", sharded, trained, "--out", tmp_path / "there", "--", *flags)
    assert files(tmp_path / "there").keys() == files(tmp_path / "here").keys()
    for name, content in files(tmp_path / "here").items():
        if name.endswith(".parquet"):
            assert files(tmp_path / "there")[name] == content, name


@ENGINES
def test_a_worker_that_is_killed(cluster: Cluster, raw: Path, sharded: Path, worker: Path, tmp_path: Path) -> None:
    """The engine does its work again."""
    data = tmp_path / "data"
    start = command("shard", raw, data, *SMALL, "--", *process(cluster, worker))
    launcher = subprocess.Popen(start, env=environment(), stderr=subprocess.PIPE, text=True)
    assert launcher.stderr is not None
    for line in launcher.stderr:
        if line.startswith("sharding into"):
            break
    limit = time.monotonic() + 60
    while not python_workers(cluster):
        assert launcher.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.05)
    os.kill(python_workers(cluster)[0], signal.SIGKILL)
    rest = launcher.stderr.read()
    assert launcher.wait(200) == 0, rest
    assert files(data) == files(sharded)
