"""`extremis-worker`: what it asks of a runner's provision service, and what the worker is told."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from apache_beam.portability.api import beam_provision_api_pb2, beam_provision_api_pb2_grpc
from apache_beam.runners.job.utils import dict_to_struct

from pipelines.runners import boot
from pipelines.runners.runner import choose_runner
from tests.command import ROOT, environment
from tests.engines.worker import pool, write_worker


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
    words = ["--id=1-1", f"--provision_endpoint={endpoint}", "--control_endpoint=own:3", "--artifact_endpoint=x:4"]
    own, sibling = boot.worker_environments(boot.parse(words)[1])
    assert provision.metadata["worker_id"] == "1-1"
    assert (own["WORKER_ID"], sibling["WORKER_ID"]) == ("1-1", "1-2")
    assert own["CONTROL_API_SERVICE_DESCRIPTOR"] == 'url: "own:3"\n'
    assert own["LOGGING_API_SERVICE_DESCRIPTOR"] == 'url: "provided:2"\n'
    assert own["RUNNER_CAPABILITIES"] == "one two"
    assert json.loads(own["PIPELINE_OPTIONS"]) == {"beam:option:runner:v1": "PortableRunner"}
    assert "STATUS_API_SERVICE_DESCRIPTOR" not in own


def test_a_worker_of_a_pool_answers(tmp_path: Path) -> None:
    """Beam's job server of one process asks the pool for it."""
    said: list[str] = []
    with pool(write_worker(tmp_path / "extremis-worker", ROOT)) as port:
        flags = ["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=EXTERNAL"]
        choose_runner([*flags, f"--environment_config=localhost:{port}"]).check([], str(tmp_path / "data"), said.append)
    assert said[-1].startswith("1 worker answered")


def test_by_hand_it_says_what_it_is_for() -> None:
    command = [sys.executable, "-m", "pipelines.runners.boot"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "did you mean --worker_pool?" in done.stderr
