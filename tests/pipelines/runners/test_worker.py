"""`extremis-worker`: what it asks of an engine's provision service, what the worker is told, and what it answers."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import grpc
import pytest
from apache_beam.portability.api import beam_provision_api_pb2, beam_provision_api_pb2_grpc
from apache_beam.runners.job.utils import dict_to_struct

from pipelines.flow import Flow
from pipelines.runners import worker
from pipelines.runners.local import choose_runner
from pipelines.runners.worker import OPTION, Question, answer, compare_versions, versions
from schemas import storage
from schemas.errors import InputError
from tests.command import ROOT, environment
from tests.engines.worker import pool, write_worker
from tests.processes import wait_until_none, with_word


class Provision(beam_provision_api_pb2_grpc.ProvisionServiceServicer):
    """A provision service of a runner with two workers on a machine."""

    def GetProvisionInfo(self, request, context):
        self.metadata = dict(context.invocation_metadata())
        info = beam_provision_api_pb2.ProvisionInfo(
            pipeline_options=dict_to_struct({"beam:option:runner:v1": "PortableRunner"}),
            runner_capabilities=["one", "two"],
            sibling_worker_ids=["1-2"],
        )
        info.control_endpoint.url = "provided:1"
        info.logging_endpoint.url = "provided:2"
        return beam_provision_api_pb2.GetProvisionInfoResponse(info=info)


@pytest.fixture
def service() -> Iterator[tuple[Provision, str]]:
    server = grpc.server(ThreadPoolExecutor(1))
    provision = Provision()
    beam_provision_api_pb2_grpc.add_ProvisionServiceServicer_to_server(provision, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield provision, f"127.0.0.1:{port}"
    server.stop(0)


def test_a_worker_is_told_what_the_runner_says(service: tuple[Provision, str]) -> None:
    provision, endpoint = service
    words = ["--id='1-1'", f"--provision_endpoint={endpoint}", "--artifact_endpoint=x:4"]
    own, siblings = worker.worker_environment(worker.parse(words)[1])
    assert provision.metadata["worker_id"] == own["WORKER_ID"] == "1-1"
    assert list(siblings) == ["1-2"]
    sibling, siblings = worker.worker_environment(worker.parse([*words, "--id=1-2", "--sibling"])[1])
    assert sibling == own | {"WORKER_ID": "1-2"}
    assert not siblings
    assert own["CONTROL_API_SERVICE_DESCRIPTOR"] == 'url: "provided:1"\n'
    assert own["LOGGING_API_SERVICE_DESCRIPTOR"] == 'url: "provided:2"\n'
    assert own["RUNNER_CAPABILITIES"] == "one two"
    assert json.loads(own["PIPELINE_OPTIONS"]) == {"beam:option:runner:v1": "PortableRunner"}
    assert "STATUS_API_SERVICE_DESCRIPTOR" not in own


def nothing(element: str) -> str:
    return element


def run_on(flags: list[str], folder: Path) -> str:
    """Ask the workers of an engine, run a flow there; the last that is said."""
    said: list[str] = []
    flow = Flow()
    flow.create("Create", ["x"]).map("Nothing", nothing)
    with choose_runner(flags) as runner:
        runner.check([], str(folder), said.append)
        runner.run(flow)
    return said[-1]


def test_a_worker_of_a_pool_answers(tmp_path: Path) -> None:
    """Beam's job server of one process asks the pool for it; nothing of the pool is left once it is killed."""
    mark = f"POOL={tmp_path}"
    with pool(write_worker(tmp_path / "extremis-worker", ROOT, env={"POOL": str(tmp_path)})) as port:
        flags = ["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=EXTERNAL"]
        assert run_on([*flags, f"--environment_config=localhost:{port}"], tmp_path).startswith("1 worker answered")
        assert any("serve_warm" in line for line in with_word(mark, "environ"))
    wait_until_none(mark, "environ")


def test_a_worker_with_another_beam_says_so_where_the_launcher_looks(tmp_path: Path) -> None:
    """Before Beam compares them, too, and tells a log on the worker's machine."""
    (tmp_path / "sitecustomize.py").write_text("import apache_beam\napache_beam.version.__version__ = '2.1.0'")
    program = write_worker(tmp_path / "extremis-worker", ROOT, env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    launcher = """
import os, sys
from pathlib import Path
from schemas.errors import InputError
from tests.pipelines.runners.test_worker import run_on
try:
    run_on(sys.argv[2:], Path(sys.argv[1]))
except InputError as error:
    print(error, flush=True)
os._exit(0)  # Beam's job server of this process waits for the worker for ever
"""
    flags = ["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=EXTERNAL"]
    with pool(program) as port:
        start = [sys.executable, "-c", launcher, str(tmp_path), *flags, f"--environment_config=localhost:{port}"]
        said = subprocess.run(start, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert re.search(r"the worker .* has Extremis .*, Beam 2\.1\.0.* the launching process has ", said)


def stay(seconds: float, folder: Path) -> None:
    """Stay at work, and leave a mark when it begins and when it is done."""
    (folder / f"begun-{seconds:g}").touch()
    time.sleep(seconds)
    (folder / f"done-{seconds:g}").touch()


def test_runners_that_share_a_pool_and_call_their_workers_alike_stop_none_of_each_other(tmp_path: Path) -> None:
    """The first one stops its worker while that of the second one is at work."""

    def start(seconds: float) -> threading.Thread:
        flow = Flow()
        flow.create("Create", [seconds]).map("Stay", stay, tmp_path)
        thread = threading.Thread(target=choose_runner(flags).run, args=(flow,))
        thread.start()
        while not (tmp_path / f"begun-{seconds:g}").exists():
            assert thread.is_alive()
            time.sleep(0.05)
        return thread

    with worker.serve_pool() as port:
        flags = ["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=EXTERNAL"]
        flags.append(f"--environment_config=localhost:{port}")
        for thread in [start(1.0), start(3.0)]:
            thread.join(120)
    assert (tmp_path / "done-3").exists()


def test_by_hand_it_says_what_it_is_for() -> None:
    command = [sys.executable, "-c", "from pipelines.runners.worker import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "Did you mean --worker_pool?" in done.stderr


OTHER = "Extremis 9.9, Beam 2.1.0, Python 3.99"


def question(folder: Path, stated: str, *reads: Path) -> Question:
    storage.write_bytes(str(folder / "launcher.json"), b"{}")
    return Question(folder.name, stated, tuple(map(str, reads)), str(folder), 0.0)


def test_a_worker_answers_once(tmp_path: Path) -> None:
    asked = question(tmp_path / "asked-once", versions())
    answer(asked)
    answer(asked)
    assert len(list((tmp_path / "asked-once").iterdir())) == 2
    assert asked.summarize().startswith("1 worker answered, the last after ")


def test_a_worker_names_itself_and_what_it_lacks(tmp_path: Path) -> None:
    """To the engine, and where the launching process looks."""
    host = socket.gethostname()
    other = question(tmp_path / "versions", OTHER)
    absent = question(tmp_path / "absent-input", versions(), tmp_path / "absent")
    for asked, said in (
        (other, rf"{host}, process \d+ has Extremis .*Beam 2\.1\.0, Python 3\.99"),
        (absent, rf"{host}.* cannot see the file {tmp_path}/absent.*shared file system"),
    ):
        with pytest.raises(InputError, match=said):
            answer(asked)
        with pytest.raises(InputError, match=said):
            asked.answers()


def test_a_worker_compares_versions_before_beam_does(tmp_path: Path) -> None:
    """By the options that its runner gives it."""
    compare_versions({})
    same, other = (question(tmp_path / name, stated) for name, stated in (("same", versions()), ("other", OTHER)))
    compare_versions({f"beam:option:{OPTION}:v1": json.dumps(asdict(same))})
    assert not same.answers()
    with pytest.raises(InputError, match=r"has Extremis .*the launching process has .*Beam 2\.1\.0"):
        compare_versions({f"beam:option:{OPTION}:v1": json.dumps(asdict(other))})
    with pytest.raises(InputError, match=r"Install the same versions"):
        other.answers()
