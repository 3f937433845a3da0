"""Profile of a step on the device by PyTorch's profiler: launches, kernels by time, and idle time."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Bench

_COPIES = ("Memcpy", "Memset")
_TOP, _NAME = 12, 80


class Span(NamedTuple):
    """A kernel or a copy on the device: microseconds [start, end)."""

    name: str
    start: float
    end: float


def spans_of(events: Iterable[Any]) -> list[Span]:
    """Return the work of the device, without calls of the driver and without named ranges of the program."""
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def busy_seconds(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one span runs; overlaps count once."""
    busy = end = 0.0
    for span in sorted(spans, key=lambda each: each.start):
        busy += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return busy / 1e6


def idle_share(bench: Bench, work: Callable[[], object]) -> float:
    """Return the share of the time of `work` in which the device is idle."""
    spans, total = _recorded(bench, work)
    return 1 - busy_seconds(spans) / total


def _recorded(bench: Bench, work: Callable[[], object]) -> tuple[list[Span], float]:
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        total = bench.seconds(work)
    return spans_of(recorded.events() or []), total


def profiled(bench: Bench, step: Callable[[], object], trace: str = "") -> dict[str, Any]:
    """Return figures of a step; the file `trace` gets a trace of one step, for a browser.

    `host_ms`: time until the program has launched a step on the device. `idle_share`: share of the time in which the
    device is idle. On a CPU there are only figures of the host and its operations.
    """
    steps = 1 if bench.quick else 20 if bench.on_gpu else 3
    for _ in range(3):
        step()
    bench.wait()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    given = time.perf_counter()
    bench.wait()
    figures: dict[str, Any] = {
        "ms": 1000 * (time.perf_counter() - began) / steps,
        "host_ms": 1000 * (given - began) / steps,
    }
    both = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.on_gpu else [])]
    with profile(activities=both) as recorded:
        step()
        bench.wait()
    figures["operations"] = sum(event.device_type == DeviceType.CPU for event in recorded.events() or [])
    if trace:
        recorded.export_chrome_trace(str(bench.folder / trace))
    if bench.on_gpu:
        figures |= _of_device(*_recorded(bench, lambda: [step() for _ in range(steps)]), steps)
    return figures


def _of_device(spans: list[Span], total: float, steps: int) -> dict[str, Any]:
    milliseconds: dict[str, float] = defaultdict(float)
    for span in spans:
        milliseconds[span.name[:_NAME]] += (span.end - span.start) / 1000 / steps
    top = sorted(milliseconds.items(), key=lambda item: -item[1])
    copies = sum(span.name.startswith(_COPIES) for span in spans)
    return {
        "launches": (len(spans) - copies) / steps,
        "copies": copies / steps,
        "device_ms": sum(milliseconds.values()),
        "idle_share": 1 - busy_seconds(spans) / total,
        "top_ms": {name: round(value, 4) for name, value in top[:_TOP]},
    }
