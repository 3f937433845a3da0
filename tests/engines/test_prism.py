"""Flows on Prism, Beam's portable runner for one machine, by its name. Its bytes: test_same_bytes.py."""

import threading
from pathlib import Path

import pytest

from pipelines.flow import Flow
from pipelines.runners.local import choose_runner
from schemas.errors import ExtremisError, InputError, StorageError
from tests.engines.clusters import Cluster
from tests.pipelines.runners.test_runner import require_everything, run_on
from tests.pipelines.runners.work import die, everything, fail
from tests.processes import wait_until_none, with_word

pytestmark = pytest.mark.engine


def test_it_runs_flows_by_its_name(prism: Cluster, tmp_path: Path) -> None:
    """In any thread; one job server for all flows, and nothing of it left."""

    def run() -> None:
        with choose_runner(prism.by_name) as runner:
            for name in ("one", "two"):
                runner.run(everything(tmp_path / name))
                servers.append({line for line in with_word("--job_port") if prism.by_name[1].partition("=")[2] in line})
                flow = Flow()
                flow.create("Create", ["x"]).map("Fail", fail)
                with pytest.raises(StorageError, match=r"^could not write x: \[disk full\]\nfree some space\.$"):
                    runner.run(flow)

    servers: list[set[str]] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for name in ("one", "two"):
        require_everything(tmp_path / name)
    assert servers[0]
    assert servers[0] == servers[1]
    wait_until_none(next(iter(servers[0])).partition("--job_port")[2].split()[0])


def test_a_worker_that_dies_in_each_bundle_is_said_to_be_dead(prism: Cluster) -> None:
    with pytest.raises(ExtremisError, match="worker"):
        run_on([*prism.by_name], die)


def test_a_place_that_workers_do_not_see_is_named(prism: Cluster) -> None:
    """A place that is another for each process, as a disk is for each machine. No one has asked these workers."""
    flow = Flow()
    flow.create("Create", ["x"]).map("Nothing", str)
    with choose_runner([*prism.by_name, "--start_timeout=59"]) as runner:
        runner.check([], "memory://data", lambda line: None)
        with pytest.raises(InputError, match=r"cannot see the file memory://data/check/launcher"):
            runner.run(flow)
