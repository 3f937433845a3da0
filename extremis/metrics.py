"""Metrics for Prometheus of any process at work: the numbers and texts of its state (schemas/states.py)."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from schemas import storage
from schemas.errors import InputError, option
from schemas.states import state
from schemas.waits import Say

_HELP = {
    "step": "Optimizer steps done.",
    "steps_total": "Optimizer steps of the whole run.",
    "loss": "Loss of the last step.",
    "rows_per_second": "Rows per second, averaged over the last seconds.",
    "rows": "Rows done by the stage at work.",
    "rows_total": "Rows of the stage at work.",
    "tables": "Tables made since this process started.",
    "table_seconds": "Seconds that the last table took.",
    "recall": "Recall of the last table, of the least of its sources.",
    "retries": "Attempts that failed and were repeated.",
    "waiting_seconds": "Seconds that this process has waited; 0: it does not wait.",
}


def metrics() -> Iterator[Any]:
    """Yield a gauge for each number of this process's state, and one whose labels are the texts."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    yield CounterMetricFamily("extremis_storage_retries", "Requests to storage, tried again.", storage.retries)
    shown = state()
    since = shown.pop("waits_since", None)
    shown["waiting_seconds"] = 0.0 if since is None else max(0.0, time.time() - since)
    texts = {name: value for name, value in sorted(shown.items()) if isinstance(value, str)}
    for name, value in sorted(shown.items()):
        if name not in texts:
            words = _HELP.get(name, "Newest value in metrics.jsonl of the run.")
            yield GaugeMetricFamily(f"extremis_{name}", words, value)
    if texts:
        described = GaugeMetricFamily("extremis_state", "What this process does, as labels.", labels=[*texts])
        described.add_metric([*texts.values()], 1)
        yield described


@contextlib.contextmanager
def serve_metrics(place: tuple[str, int] | None, say: Say) -> Iterator[int | None]:
    """Serve the metrics of this process until the block ends; yield the port.

    `place`: host and port (0: any free port); None: no server. Raises InputError if the port cannot be opened.
    """
    if place is None:
        yield None
        return
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.registry import Collector

    class State(Collector):
        def collect(self) -> Iterator[Any]:
            return metrics()

    host, port = place
    registry = CollectorRegistry()
    registry.register(State())
    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        given = option("metrics_port", port)
        raise InputError(f"{given}: cannot listen on {host}: {error}. Choose another port.") from None
    answer: Any = server.get_app()

    def respond(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            return answer(environ, start_response)
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
