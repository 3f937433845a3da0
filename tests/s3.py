"""A local server that speaks S3, as a process of its own."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serve(log: Path) -> Iterator[int]:
    """The port of a moto server that runs until the block ends; it writes to `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            _wait_for(port, server)
            yield port
        finally:
            server.kill()
            server.wait()


def _wait_for(port: int, server: subprocess.Popen) -> None:
    limit = time.monotonic() + 60
    while True:
        assert server.poll() is None, "moto_server ended"
        assert time.monotonic() < limit, "moto_server does not answer"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
