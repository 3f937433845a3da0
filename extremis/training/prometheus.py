"""`--metrics-port`: an HTTP server of a run's metrics at http://HOST:PORT/metrics, for Prometheus."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from schemas.errors import InputError

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def serving(collector: Collector, port: int | None, host: str, say: Callable[[str], None]) -> Iterator[int | None]:
    """Serve the metrics of `collector` until the block ends; yield the port, a free one for 0. `port` None: do nothing.

    Raises InputError where the port cannot be opened.
    """
    if port is None:
        yield None
        return
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise InputError(f"--metrics-port {port}: cannot listen on {host}: {error}. Choose another one.") from None
    metrics: Any = server.get_app()

    def respond(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            return metrics(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"metrics are at /metrics\n"]

    server.set_app(respond)
    try:
        say(f"metrics for Prometheus at http://{host}:{server.server_port}/metrics")
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
