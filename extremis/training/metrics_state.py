"""A run as it goes: the newest figures, for a progress line, and as Prometheus reads them."""

import re
import threading
import time
from collections.abc import Mapping
from typing import Any

_RATE_SECONDS = 10.0  # what a rate is averaged over
_HELP = {
    "step": "Optimizer steps done.",
    "steps_total": "Optimizer steps of the whole run.",
    "loss": "Loss of the last step.",
    "rows_per_second": "Rows trained a second, over the last seconds.",
}


class Live:
    """Figures of one run. `record` and `step` are the trainer's; the rest may be read by any thread."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._lock = threading.Lock()
        self._figures: dict[str, float] = {}
        self._table = ""
        self._mark: tuple[float, int] | None = None  # when and where the rate is counted from

    def step(self, step: int, total: int, loss: float) -> None:
        """After each step."""
        now = time.monotonic()
        with self._lock:
            self._figures |= {"step": step, "steps_total": total, "loss": loss}
            if self._mark is None:
                self._mark = now, step
            seconds = now - self._mark[0]
            if seconds > 0.5:
                self._figures["rows_per_second"] = (step - self._mark[1]) * self._batch / seconds
            if seconds >= _RATE_SECONDS:
                self._mark = now, step

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """What the run records: its numbers become figures `<kind>_<name>`; a number that is unknown now is dropped."""
        with self._lock:
            for name, value in values.items():
                figure = re.sub(r"\W+", "_", f"{kind}_{name}".replace("@", "_at_"))
                if isinstance(value, int | float):
                    self._figures[figure] = float(value)
                else:
                    self._figures.pop(figure, None)
            if kind == "adoption":
                self._table = _table_of(values)

    def note(self) -> str:
        """Loss, rate, and the table that is trained on."""
        with self._lock:
            figures, table = dict(self._figures), self._table
        rate = figures.get("rows_per_second")
        parts = [
            f"loss {figures['loss']:.3f}" if "loss" in figures else "",
            f"{rate:,.0f} rows/s" if rate else "",
            table,
        ]
        return "  ".join(part for part in parts if part)

    def exposition(self) -> str:
        """All figures in Prometheus' text format."""
        with self._lock:
            figures = sorted(self._figures.items())
        lines = []
        for name, value in figures:
            if name in _HELP:
                lines.append(f"# HELP extremis_{name} {_HELP[name]}")
            lines += [f"# TYPE extremis_{name} gauge", f"extremis_{name} {_number(value)}"]
        return "\n".join([*lines, ""])


def _table_of(values: Mapping[str, Any]) -> str:
    """The table in use, by the epoch that it was made for; how far back that lies where the next one is late."""
    made_for, late = values.get("table_epoch"), values.get("late")
    if made_for is None:
        return "no table yet: late" if late else ""
    overdue = f", {values['epoch'] - made_for} epoch(s) back, late" if late else ""
    return f"table {made_for}{overdue}{', stale' if values.get('stale') else ''}"


def _number(value: float) -> str:
    """As Prometheus writes it: NaN, +Inf and -Inf included."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.10g}"
