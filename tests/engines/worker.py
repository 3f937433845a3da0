"""Boot programs of workers, as an installation has them at bin/extremis-worker; and Beam options that name them."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.engines.clusters import WORKERS, Cluster, free_ports, listens

SECONDS = 900  # for a command: engines take their time where others work, too
_COMMON = (f"--parallelism={WORKERS}", "--start_timeout=240")  # machines of tests are shared, and slow at times


NO_CHECK = ("--start_timeout=0",)  # workers are not asked before the start: other tests look at that
_PROGRAM = """\
#!{python}
import os, sys, time
os.environ.update({environment!r})
sys.path.insert(0, {checkout!r})
{before}
from pipelines.runners.worker import main
main()
"""


def write_worker(path: Path, checkout: Path, before: str = "", env: Mapping[str, str] | None = None) -> Path:
    """Write a program that starts workers of `checkout`, with `env` in their environment; `before` is Python."""
    environment = {
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(env or {}),
    }
    program = _PROGRAM.format(python=sys.executable, environment=environment, checkout=str(checkout), before=before)
    path.write_text(program)
    path.chmod(0o755)
    return path


@contextmanager
def pool(program: Path) -> Iterator[int]:
    """Serve EXTERNAL environments until the block ends; the port."""
    (port,) = free_ports(1)
    with program.with_name(f"pool-{port}.log").open("w") as log:
        server = subprocess.Popen([program, "--worker_pool", f"--service_port={port}"], stdout=log, stderr=log)
        try:
            limit = time.monotonic() + 120
            while not listens(port):
                assert server.poll() is None, "the worker pool ended"
                assert time.monotonic() < limit, "no worker pool"
                time.sleep(0.2)
            yield port
        finally:
            server.kill()  # its workers end with it
            server.wait()


def loopback(cluster: Cluster) -> list[str]:
    """Return Beam options: the launching process is the worker."""
    return [*cluster.endpoints, "--environment_type=LOOPBACK", *_COMMON]


def process(cluster: Cluster, program: Path | str) -> list[str]:
    """Return Beam options: the engine starts `program` for each of its workers."""
    return _environment(cluster, "PROCESS", json.dumps({"command": str(program)}))


def external(cluster: Cluster, port: int) -> list[str]:
    """Return Beam options: a pool of workers listens on `port`, for all machines of the engine."""
    return _environment(cluster, "EXTERNAL", f"localhost:{port}")


def _environment(cluster: Cluster, kind: str, config: str) -> list[str]:
    options: Sequence[str] = (f"--environment_type={kind}", f"--environment_config={config}")
    return [*cluster.endpoints, *options, *_COMMON]
