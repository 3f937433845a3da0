"""Slow stores in separate processes: a folder over HTTP with byte ranges, and an S3 server.

    python -m benchmarks.common.slow_stores FOLDER SECONDS     prints its port first

The HTTP server reads no file into memory, so that it takes little time next to the measured process. The S3 server is
moto's, behind the proxy of the tests; both are Python and slow.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from tests import faults, s3

_RANGE = re.compile(r"bytes=(\d+)-(\d+)?")


BUCKET = "benchmark"


@dataclass(frozen=True)
class Server:
    """A running server: the URL of the folder, and environment variables for clients."""

    url: str
    processes: tuple[psutil.Process, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the server so far."""
        times = [process.cpu_times() for process in self.processes]
        return float(sum(cpu.user + cpu.system for cpu in times))


@contextmanager
def serve(folder: str, seconds: float) -> Iterator[Server]:
    """Serve `folder` until the block ends; each answer is `seconds` late."""
    with _serving(folder, seconds) as (port, process):
        yield Server(f"http://127.0.0.1:{port}", (process,))


@contextmanager
def serve_s3(folder: str, seconds: float) -> Iterator[Server]:
    """Serve a copy of `folder` in a bucket until the block ends; each answer is `seconds` late."""
    import boto3

    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    before = set(psutil.Process().children())
    with tempfile.NamedTemporaryFile() as log, s3.serve(Path(log.name)) as port:
        moto = set(psutil.Process().children()) - before
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
            region_name=keys["AWS_DEFAULT_REGION"],
        )
        client.create_bucket(Bucket=BUCKET)
        for path in Path(folder).rglob("*"):
            if path.is_file():
                client.upload_file(str(path), BUCKET, str(path.relative_to(folder)))
        with _serving("--proxy", str(port), str(seconds)) as (between, process):
            environment = {**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{between}"}
            yield Server(f"s3://{BUCKET}", (process, *moto), environment)


@contextmanager
def _serving(*arguments: object) -> Iterator[tuple[int, psutil.Process]]:
    """Run this module as a process; yield the port and the process."""
    command = [sys.executable, "-m", "benchmarks.common.slow_stores", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


class _Handler(SimpleHTTPRequestHandler):
    """Answers GET and HEAD for whole files or one range."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, *arguments: object, seconds: float, **named: object) -> None:
        self._seconds = seconds
        super().__init__(*arguments, **named)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        time.sleep(self._seconds)
        path = self.translate_path(self.path)
        try:
            file = open(path, "rb")  # noqa: SIM115
        except (FileNotFoundError, IsADirectoryError):
            self.send_error(404)
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            requested = _RANGE.fullmatch(self.headers.get("Range", ""))
            start = int(requested[1]) if requested else 0
            stop = min(size, int(requested[2]) + 1) if requested and requested[2] else size
            self.send_response_only(206 if requested else 200)
            if requested:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            self.wfile.flush()
            while self.command == "GET" and start < stop:
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Ignore a client that has disconnected."""


def main() -> None:
    """Serve until killed."""
    if sys.argv[1] == "--proxy":
        with faults.proxy(("127.0.0.1", int(sys.argv[2]))) as between:
            between.faults = faults.Faults(delay_seconds=float(sys.argv[3]))
            print(between.server_address[1], flush=True)
            threading.Event().wait()
    handler = functools.partial(_Handler, directory=sys.argv[1], seconds=float(sys.argv[2]))
    server = _Server(("127.0.0.1", 0), handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
