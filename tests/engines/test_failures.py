"""Failures of a cluster, each made for real: one message that names what is wrong and what helps, no traceback."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from schemas import VERSION
from tests.command import ROOT, Done, command, environment, extremis, refused
from tests.engines import clusters, pieces
from tests.engines.clusters import Cluster, jobs_left, python_workers
from tests.engines.conftest import SMALL, files, install
from tests.engines.worker import SECONDS, loopback, process, write_worker

pytestmark = pytest.mark.engine

STARVED = 1  # MiB of network buffers


@pytest.fixture(scope="module")
def flink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start Flink; it tries nothing again."""
    install(pieces.FLINK)
    with clusters.flink(tmp_path_factory.mktemp("failures") / "cluster", attempts=0) as cluster:
        yield cluster


def test_a_worker_of_another_version(flink: Cluster, raw: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("search", "pipelines", "trainer", "scoring", "extremis", "recipes"):
        (other / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "schemas", other / "schemas")
    stated = other / "schemas" / "__init__.py"
    stated.write_text(stated.read_text().replace(f'"{VERSION}"', '"9.9"'))
    program = write_worker(tmp_path / "extremis-worker", other)
    done = extremis(
        "shard", raw, tmp_path / "data", *SMALL, "--", *process(flink, program), check=False, timeout=SECONDS
    )
    refused(done, socket.gethostname(), "has Extremis 9.9", "the launching process has", "Install the same")
    assert not (tmp_path / "data" / "_manifest.json").exists()


def test_a_place_that_a_worker_does_not_reach(flink: Cluster, tmp_path: Path, worker: Path) -> None:
    """A place that is another for each process, as a disk is for each machine."""
    program = """
import sys
from pipelines.flow import Flow
from pipelines.runners.local import choose_runner
from schemas.errors import ExtremisError
flow = Flow()
flow.create("One", [1]).map("Text", str)
try:
    with choose_runner(sys.argv[2:]) as runner:
        runner.check([], sys.argv[1], lambda line: None)
        runner.run(flow)
except ExtremisError as error:
    print("error:", error)
"""
    start = [sys.executable, "-c", program, "memory://data", *process(flink, worker)]
    done = subprocess.run(
        start, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    for word in (
        socket.gethostname(),
        "cannot see the file",
        "memory://data/check/launcher.json",
        "shared file system",
    ):
        assert word in done.stdout


def test_a_program_that_is_not_there(flink: Cluster, raw: Path, tmp_path: Path) -> None:
    flags = process(flink, tmp_path / "nowhere")
    done = extremis("shard", raw, tmp_path / "data", *SMALL, "--", *flags, check=False, timeout=SECONDS)
    refused(done, "cannot start its workers (No such file", "PROCESS", "extremis-worker")


def test_a_worker_that_ends_before_it_answers(flink: Cluster, raw: Path, tmp_path: Path, worker: Path) -> None:
    program = write_worker(tmp_path / "broken", ROOT, "sys.exit(3)")
    done = extremis(
        "shard", raw, tmp_path / "data", *SMALL, "--", *process(flink, program), check=False, timeout=SECONDS
    )
    refused(done, "ended with status 3", "extremis-worker")


def test_a_worker_that_never_comes(flink: Cluster, raw: Path, tmp_path: Path) -> None:
    program = write_worker(tmp_path / "asleep", ROOT, "time.sleep(20)")  # so long the slot is taken
    flags = [*process(flink, program), "--start_timeout=10"]
    done = extremis("shard", raw, tmp_path / "data", *SMALL, "--", *flags, check=False, timeout=SECONDS)
    refused(done, "no worker answered within 10 s", str(program), "--start-timeout", status=3)
    assert not jobs_left(flink) or "may still be using slots on Flink" in done.err


def test_no_job_server(raw: Path, tmp_path: Path) -> None:
    """It is said within seconds, by the address."""
    flags = ("--runner=PortableRunner", "--job_endpoint=localhost:9", "--environment_type=LOOPBACK")
    done = extremis("shard", raw, tmp_path / "data", *SMALL, "--", *flags, check=False, timeout=SECONDS)
    refused(done, "no job server at --job_endpoint=localhost:9", "Start Beam's job server", status=3)


@pytest.mark.slow
def test_a_job_server_that_looks_for_flink_elsewhere(flink: Cluster, raw: Path, tmp_path: Path) -> None:
    """Its Flink asks twenty times, every 3 s, before it says so."""
    lost = replace(flink, endpoints=clusters.serve_jobs(flink, "lost-job-server", "localhost:9"))
    done = extremis("shard", raw, tmp_path / "data", *SMALL, "--", *loopback(lost), check=False, timeout=SECONDS)
    refused(done, "the job server cannot reach the master of its engine", "--flink_master", status=3)


def test_no_slot(flink: Cluster, raw: Path, tmp_path: Path) -> None:
    """Flink says so before a job begins, where its address is known, and after it otherwise; no job is left."""
    flags = [*loopback(flink), "--parallelism=7"]  # the last word counts
    done = extremis("shard", raw, tmp_path / "data", *SMALL, "--", *flags, check=False, timeout=SECONDS)
    refused(
        done,
        "too few free slots for the job: ",
        " of 2 slots are free on 2 TaskManagers, 7 are needed",
        "Lower the parallelism",
        status=3,
    )
    flags = [flag for flag in flags if not flag.startswith("--flink_master")]
    done = extremis("shard", raw, tmp_path / "data", *SMALL, "--", *flags, check=False, timeout=SECONDS)
    refused(done, "no free slot", "--parallelism", status=3)
    assert not jobs_left(flink)


def test_two_task_managers_that_call_their_workers_alike(flink: Cluster, raw: Path, tmp_path: Path) -> None:
    """Flink tries nothing again here, so no worker is stopped by the other's."""
    extremis("shard", raw, tmp_path / "here", *SMALL)
    extremis("shard", raw, tmp_path / "data", *SMALL, "--", *loopback(flink), timeout=SECONDS)
    assert files(tmp_path / "data") == files(tmp_path / "here")


def test_a_job_server_that_is_killed(flink: Cluster, raw: Path, tmp_path: Path) -> None:
    """Its job is ended on Flink, where its address is known."""
    start = command("shard", raw, tmp_path / "data", *SMALL, "--", *loopback(flink))
    launcher = subprocess.Popen(start, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + SECONDS
    while not jobs_left(flink):
        assert launcher.poll() is None, launcher.stderr and launcher.stderr.read()
        assert time.monotonic() < limit
        time.sleep(0.05)
    flink.replace("job-server")
    out, err = launcher.communicate(timeout=SECONDS)
    refused(Done(launcher.returncode, out, err), "the job server at localhost:", "has ended", status=3)
    assert not jobs_left(flink)


def test_no_job_manager(raw: Path, tmp_path: Path, flink: Cluster) -> None:
    flags = [*loopback(flink), "--flink_master=localhost:9"]
    done = extremis("shard", raw, tmp_path / "data", *SMALL, "--", *flags, check=False, timeout=SECONDS)
    refused(done, "no Flink JobManager answers at --flink_master=http://localhost:9: ", "Start the", status=3)


@pytest.mark.slow
def test_too_few_network_buffers(raw: Path, tmp_path: Path, worker: Path) -> None:
    """What to set is more than there is."""
    install(pieces.FLINK)
    with clusters.flink(tmp_path / "cluster", network=STARVED, attempts=0) as starved:
        flags = process(starved, worker)
        done = extremis("shard", raw, tmp_path / "data", *SMALL, "--", *flags, check=False, timeout=SECONDS)
    refused(done, "too few network buffers", "taskmanager.memory.network.min")
    said = re.search(r"to (\d+)mb or more", done.err)
    assert said
    assert int(said[1]) > STARVED


@pytest.mark.slow
def test_a_task_manager_out_of_memory(raw: Path, tmp_path: Path, worker: Path) -> None:
    """It ends for want of memory for Java's classes, and its job with it."""
    install(pieces.FLINK)
    settings = "taskmanager.memory.jvm-metaspace.size: 48m\n"
    with clusters.flink(tmp_path / "cluster", attempts=0, settings=settings) as starved:
        flags = process(starved, worker)
        done = extremis("shard", raw, tmp_path / "data", *SMALL, "--", *flags, check=False, timeout=SECONDS)
        assert not jobs_left(starved)
    refused(done, "ran out of memory for Java's classes", "taskmanager.memory.jvm-metaspace.size", status=6)


def test_a_launcher_that_is_ended_cancels_its_job(flink: Cluster, raw: Path, tmp_path: Path, worker: Path) -> None:
    start = command("shard", raw, tmp_path / "data", *SMALL, "--", *process(flink, worker))
    idle = set(python_workers(flink))  # Flink keeps some of jobs that have failed
    launcher = subprocess.Popen(start, env=environment(), stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + SECONDS
    while idle.issuperset(python_workers(flink)):
        assert launcher.poll() is None, launcher.stderr and launcher.stderr.read()
        assert time.monotonic() < limit
        time.sleep(0.1)
    os.kill(launcher.pid, signal.SIGTERM)
    launcher.wait(SECONDS)
    while not idle.issuperset(python_workers(flink)):
        assert time.monotonic() < limit, "workers of a cancelled job"
        time.sleep(0.2)
    assert not jobs_left(flink)
