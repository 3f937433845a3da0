"""Boot programs of workers, as an installation has them at bin/extremis-worker; and Beam options that name them."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.engines.clusters import WORKERS, Cluster


def write_worker(path: Path, checkout: Path, before: str = "") -> Path:
    """Write a program that starts workers of `checkout`; `before` are lines of shell ahead of it."""
    lines = [
        "#!/bin/sh",
        f"export PYTHONPATH={checkout} OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false",
        before,
        f'exec {sys.executable} -m pipelines.runners.boot "$@"',
    ]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


def loopback(cluster: Cluster) -> list[str]:
    """Return Beam options: the launching process is the worker."""
    return [*cluster.endpoints, "--environment_type=LOOPBACK", f"--parallelism={WORKERS}"]


def process(cluster: Cluster, program: Path | str) -> list[str]:
    """Return Beam options: the engine starts `program` for each of its workers."""
    return _environment(cluster, "PROCESS", json.dumps({"command": str(program)}))


def external(cluster: Cluster, port: int) -> list[str]:
    """Return Beam options: a pool of workers listens on `port`."""
    return _environment(cluster, "EXTERNAL", f"localhost:{port}")


def _environment(cluster: Cluster, kind: str, config: str) -> list[str]:
    options: Sequence[str] = (f"--environment_type={kind}", f"--environment_config={config}")
    return [*cluster.endpoints, *options, f"--parallelism={WORKERS}"]
