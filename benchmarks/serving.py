"""A folder over HTTP with byte ranges, each answer late by so many seconds; a process of its own.

    python -m benchmarks.serving FOLDER SECONDS     prints its port first

It reads nothing into memory, so that it costs little beside what it is measured with.
"""

import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import psutil

_RANGE = re.compile(r"bytes=(\d+)-(\d+)?")


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """CPU seconds that it has taken so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def serve(folder: str, seconds: float) -> Iterator[Server]:
    """`folder` served until the block ends."""
    command = [sys.executable, "-m", "benchmarks.serving", folder, str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Server(f"http://127.0.0.1:{int(process.stdout.readline())}", psutil.Process(process.pid))
    finally:
        process.kill()
        process.wait()


class _Handler(SimpleHTTPRequestHandler):
    """GET and HEAD, whole files or one range."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, *given: object, seconds: float, **named: object) -> None:
        self._seconds = seconds
        super().__init__(*given, **named)  # type: ignore[arg-type]

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
            asked = _RANGE.fullmatch(self.headers.get("Range", ""))
            start = int(asked[1]) if asked else 0
            stop = min(size, int(asked[2]) + 1) if asked and asked[2] else size
            self.send_response_only(206 if asked else 200)
            if asked:
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
        """A client that went away is none."""


def main() -> None:
    handler = functools.partial(_Handler, directory=sys.argv[1], seconds=float(sys.argv[2]))
    server = _Server(("127.0.0.1", 0), handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
