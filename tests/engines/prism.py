"""Prism, Beam's runner for one machine, of the Beam that is installed: built by Go once, and started on a free port."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apache_beam
import pytest

from tests.engines.clusters import free_ports, listens
from tests.engines.pieces import HOME

_MODULE = f"github.com/apache/beam/sdks/v2/go/cmd/prism@v{apache_beam.__version__}"
_BUILD_SECONDS = 900


def program() -> Path:
    """Return Prism; skip, with the reason, where it is not there and cannot be built: minutes, once."""
    place = HOME / f"prism-{apache_beam.__version__}" / "prism"
    if place.exists():
        return place
    if shutil.which("go") is None:
        pytest.skip(f"Prism needs Go, which is not here, or a program {place}")
    HOME.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOME) as making:
        env = {**os.environ, "GOBIN": making}
        command = ["go", "install", _MODULE]
        try:
            subprocess.run(command, env=env, check=True, timeout=_BUILD_SECONDS, capture_output=True, text=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"{' '.join(command)}: {str(error.stderr or error)[-300:]}")
        place.parent.mkdir(exist_ok=True)
        Path(making, "prism").rename(place)
    return place


@contextmanager
def prism(folder: Path) -> Iterator[tuple[str, ...]]:
    """Start Prism until the block ends; what Beam is told of it. Its log is in `folder`."""
    (port,) = free_ports(1)
    command = [str(program()), f"-job_port={port}", "-serve_http=false", "-log_kind=text"]
    with (folder / "prism.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            limit = time.monotonic() + 60
            while not listens(port):
                assert server.poll() is None, (folder / "prism.log").read_text()
                assert time.monotonic() < limit, "no Prism"
                time.sleep(0.05)
            yield "--runner=PortableRunner", f"--job_endpoint=localhost:{port}"
        finally:
            server.kill()
            server.wait()
