"""`extremis-worker`: the boot program of a worker on a cluster, in place of the one in Beam's container image.

A runner starts it with the worker's id and the endpoint of its provision service, which knows the rest; it becomes the
Python worker of the environment that it is installed in. It installs nothing: `--requirements_file` and its like are
met by that environment. With `--worker_pool` it waits for runners that ask for workers (EXTERNAL environments).
"""

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Sequence

from pipelines.runners.local import end_with_parent
from schemas.processes import python_command

_PROVISION_SECONDS = 60.0  # for the runner to say what this worker is for
POOL_PORT = 50000  # as in Beam's image
_SIBLING = "from pipelines.runners.boot import serve_beam; serve_beam()"


def main(arguments: Sequence[str] | None = None) -> None:
    """Become a worker, or serve a pool of workers, as `arguments` say; by default those of this process."""
    parser, options = parse(arguments)
    if options.worker_pool:
        _serve_pool(options.service_port)
    elif not options.id or not options.provision_endpoint:
        parser.error("a runner gives --id and --provision_endpoint; did you mean --worker_pool?")
    else:
        _become_worker(options)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return a parser of the command line, and what it made of `arguments`."""
    parser = argparse.ArgumentParser(
        "extremis-worker", description="Boot program of Beam workers: PROCESS, EXTERNAL, DOCKER.", allow_abbrev=False
    )
    parser.add_argument("--id", help="of this worker; the runner gives it")
    parser.add_argument("--provision_endpoint", help="of the runner, which gives it")
    parser.add_argument("--control_endpoint", default="", help="of the runner; default: the provision service's")
    parser.add_argument("--logging_endpoint", default="", help="of the runner; default: the provision service's")
    parser.add_argument("--semi_persist_dir", default="/tmp", help="a folder for files of the worker")
    parser.add_argument("--worker_pool", action="store_true", help="serve runners with EXTERNAL environments")
    parser.add_argument("--service_port", type=int, default=POOL_PORT, help="port of the pool")
    options, _ = parser.parse_known_args(arguments)  # runners have more, which Beam's own boot program needs
    return parser, options


def worker_environments(options: argparse.Namespace) -> list[dict[str, str]]:
    """Return the environment variables of this worker, then of those beside it: the answers of the runner.

    Raises grpc.RpcError: the runner does not answer.
    """
    import grpc
    from apache_beam.portability.api import beam_provision_api_pb2, beam_provision_api_pb2_grpc, endpoints_pb2
    from google.protobuf import json_format, text_format

    def describe(stated: str, provided: "endpoints_pb2.ApiServiceDescriptor") -> str:
        text: str = text_format.MessageToString(endpoints_pb2.ApiServiceDescriptor(url=stated) if stated else provided)
        return text

    with grpc.insecure_channel(options.provision_endpoint) as channel:
        service = beam_provision_api_pb2_grpc.ProvisionServiceStub(channel)
        request = beam_provision_api_pb2.GetProvisionInfoRequest()
        metadata = (("worker_id", options.id),)
        info = service.GetProvisionInfo(
            request, metadata=metadata, timeout=_PROVISION_SECONDS, wait_for_ready=True
        ).info
    shared = {
        "PIPELINE_OPTIONS": json_format.MessageToJson(info.pipeline_options, indent=None),
        "CONTROL_API_SERVICE_DESCRIPTOR": describe(options.control_endpoint, info.control_endpoint),
        "LOGGING_API_SERVICE_DESCRIPTOR": describe(options.logging_endpoint, info.logging_endpoint),
        "RUNNER_CAPABILITIES": " ".join(info.runner_capabilities),
        "SEMI_PERSISTENT_DIRECTORY": options.semi_persist_dir,
    }
    if info.status_endpoint.url:
        shared["STATUS_API_SERVICE_DESCRIPTOR"] = describe("", info.status_endpoint)
    return [{**shared, "WORKER_ID": name} for name in (options.id, *info.sibling_worker_ids)]


def _become_worker(options: argparse.Namespace) -> None:
    """Become the worker; those that the runner wants beside it are processes that end with it."""
    own, *siblings = worker_environments(options)
    for sibling in siblings:
        subprocess.Popen(python_command(_SIBLING), env={**os.environ, **sibling})
    os.environ.update(own)
    serve_beam()  # in this process, which has imported Beam already: seconds a pipeline


def serve_beam() -> None:
    """Serve the Beam runner that the environment names, to its end; end with the process that started this one."""
    end_with_parent()
    # Beam logs to the runner; without any other handler its first message would open one on standard error.
    logging.getLogger().addHandler(logging.NullHandler())
    from apache_beam.runners.worker import sdk_worker_main

    sdk_worker_main.main([])


def _serve_pool(port: int) -> None:
    from apache_beam.runners.worker import worker_pool_main

    program = os.path.abspath(sys.argv[0])
    worker_pool_main.main([program, f"--service_port={port}", f"--container_executable={program}"])


if __name__ == "__main__":
    main()
