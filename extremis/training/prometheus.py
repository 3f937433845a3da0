"""`--metrics-port`: the figures of a run at http://HOST:PORT/metrics, for Prometheus to fetch."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from schemas.errors import InputError

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def serving(text: Callable[[], str], port: int | None, host: str, say: Callable[[str], None]) -> Iterator[int | None]:
    """Serve what `text` gives, until the block ends; the port, which is a free one for 0. No port: nothing is served.

    Raises InputError where the port cannot be had.
    """
    if port is None:
        yield None
        return

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # a client that says nothing is let go

        def do_GET(self) -> None:
            found = self.path == "/metrics"
            body = text().encode() if found else b"figures are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: Prometheus asks every few seconds."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise InputError(f"--metrics-port {port}: cannot listen on {host}: {error}. Choose another one.") from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        say(f"figures for Prometheus at http://{host}:{server.server_port}/metrics")
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
