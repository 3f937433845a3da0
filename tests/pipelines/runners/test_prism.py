"""Commands on Prism, Beam's portable runner for one machine, as engines get them; PRISM names its program."""

import os
import threading
from pathlib import Path

import pytest

from pipelines.common.flow import Flow
from pipelines.runners.runner import choose_runner
from schemas.errors import ExtremisError, InputError, StorageError
from tests.command import call
from tests.engines.conftest import SMALL, files
from tests.pipelines.runners.test_runner import die, everything, fail, require_everything, run_on
from tests.processes import wait_until_none, with_word

PRISM = os.environ.get("PRISM")


@pytest.fixture
def prism() -> list[str]:
    """Return the Beam options of Prism."""
    if PRISM is None:
        pytest.skip("PRISM names no program of Prism")
    return ["--runner=PrismRunner", f"--prism_location={PRISM}"]


def test_it_runs_flows_by_its_name(prism: list[str], tmp_path: Path) -> None:
    """In any thread; one job server for all flows, and nothing of it left."""

    def run() -> None:
        with choose_runner(prism) as runner:
            for name in ("one", "two"):
                runner.run(everything(tmp_path / name))
                servers.append({line for line in with_word("--job_port") if str(PRISM) in line})
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


def test_tables_have_the_bytes_of_this_process(prism: list[str], raw: Path, tmp_path: Path) -> None:
    """The workers answer with the first of its jobs."""
    for place, flags in (("here", []), ("there", ["--", *prism])):
        done = call("shard", raw, tmp_path / place, *SMALL, *flags)
        assert done.status == 0, done.err
        assert (" answered, the last after " in done.err) == bool(flags)
    assert files(tmp_path / "there") == files(tmp_path / "here")


def test_a_worker_that_dies_in_each_bundle_is_said_to_be_dead(prism: list[str]) -> None:
    with pytest.raises(ExtremisError, match="worker"):
        run_on(prism, die)


def test_a_place_that_workers_do_not_see_is_named(prism: list[str]) -> None:
    """A place that is another for each process, as a disk is for each machine."""
    flow = Flow()
    flow.create("Create", ["x"]).map("Nothing", str)
    with choose_runner([*prism, "--start_timeout=59"]) as runner:  # other options, whose workers nobody has asked
        runner.check([], "memory://data", lambda line: None)
        with pytest.raises(InputError, match=r"sees no file memory://data/check/launcher"):
            runner.run(flow)


def test_a_program_that_is_not_there_names_its_option(tmp_path: Path) -> None:
    for place in (str(tmp_path / "absent"), "https://127.0.0.1:9/prism.zip"):
        with pytest.raises(InputError, match=r"PrismRunner has no job server here: .*--prism_location=PATH"):
            run_on(["--runner=PrismRunner", f"--prism_location={place}"], fail)
    program = tmp_path / "broken"
    program.write_text("#!/bin/sh\necho no such machine; exit 3\n")
    with pytest.raises(
        InputError, match=r"the job server of PrismRunner does not start .*: no such machine.* Build Prism"
    ):
        run_on(["--runner=PrismRunner", f"--prism_location={program}"], fail)
