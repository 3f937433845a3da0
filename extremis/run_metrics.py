"""The latest metrics of a run, for the progress line, and for Prometheus at http://HOST:PORT/metrics."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from schemas.errors import InputError

_RATE_SECONDS = 10.0  # seconds over which a rate is averaged
_HELP = {
    "step": "Optimizer steps done.",
    "steps_total": "Optimizer steps of the whole run.",
    "loss": "Loss of the last step.",
    "rows_per_second": "Rows trained per second, averaged over the last seconds.",
}
_RECORD = "Newest value in metrics.jsonl of the run."


class RunMetrics(Collector):
    """Metrics of one run by name. The trainer calls `step` and `record`; any thread may call the other methods."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._rate_start: tuple[float, int] | None = None  # second and step at which the rate starts

    def step(self, step: int, total: int, loss: float) -> None:
        """Record a training step."""
        second = time.monotonic()
        with self._lock:
            self._values |= {"step": step, "steps_total": total, "loss": loss}
            if self._rate_start is None:
                self._rate_start = second, step
            seconds = second - self._rate_start[0]
            if seconds > 0.5:
                self._values["rows_per_second"] = (step - self._rate_start[1]) * self._batch / seconds
            if seconds >= _RATE_SECONDS:
                self._rate_start = second, step

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Process a record of the run: numbers set the metric `<kind>_<name>`, and other values remove the metric."""
        with self._lock:
            for name, value in values.items():
                metric = re.sub(r"\W+", "_", f"{kind}_{name}".replace("@", "_at_"))
                if isinstance(value, int | float):
                    self._values[metric] = float(value)
                else:
                    self._values.pop(metric, None)

    def note(self) -> str:
        """Describe the loss, the rate, and the table in use."""
        with self._lock:
            values = dict(self._values)
        rate = values.get("rows_per_second")
        loss = f"loss {values['loss']:.3f}" if "loss" in values else ""
        return "  ".join(filter(None, [loss, f"{rate:,.0f} rows/s" if rate else "", _table_of(values)]))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all metrics; Prometheus' client calls this."""
        with self._lock:
            values = sorted(self._values.items())
        for name, value in values:
            yield GaugeMetricFamily(f"extremis_{name}", _HELP.get(name, _RECORD), value)


def _table_of(values: Mapping[str, float]) -> str:
    """Describe the table in use by the table's epoch, and by the delay if the next table is late."""
    made_for, late = values.get("adoption_table_epoch"), values.get("adoption_late")
    if made_for is None:
        return "waiting for the first table" if late else ""
    overdue = f", {values['adoption_epoch'] - made_for:.0f} epoch(s) late" if late else ""
    return f"table {made_for:.0f}{overdue}{', stale' if values.get('adoption_stale') else ''}"


@contextlib.contextmanager
def serve_metrics(
    collector: Collector, place: tuple[str, int] | None, say: Callable[[str], None]
) -> Iterator[int | None]:
    """Serve the metrics of `collector` until the block ends; yield the port.

    `place`: host and port (0: any free port); None: no server.
    Raises InputError if the port cannot be opened.
    """
    if place is None:
        yield None
        return
    host, port = place
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise InputError(f"--metrics-port {port}: cannot listen on {host}: {error}. Choose another port.") from None
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
