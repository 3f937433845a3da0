"""Bench of measurements: sizes that fit, and seconds and bytes of asynchronous work."""

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

_OF_A_CPU = 2.0  # limit in GiB for a measurement on a CPU
_GROUP, _SHORT = 0.05, 0.3  # seconds of a group of calls, and of a short call


class Measurement(NamedTuple):
    """A named function `measure` that returns figures. It takes `gib` of the device, and a GPU at most `seconds`."""

    name: str
    measure: Callable[[], dict[str, Any]]
    gib: float = 0.0
    seconds: float = 60.0
    on_cpu: bool = True  # False: it would take minutes on a CPU


@dataclass(frozen=True)
class Bench:
    """A `device`, with tiny sizes if `quick`. Results go to `folder`; `data` is a data set with a split `test`."""

    device: torch.device
    quick: bool
    folder: Path
    data: Path

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def free_gib(self) -> float:
        """Return the GiB available to a measurement."""
        return torch.cuda.mem_get_info(self.device)[0] / 2**30 if self.on_gpu else _OF_A_CPU

    def reason_to_skip(self, one: Measurement) -> str:
        """Return the reason for leaving out a measurement here, or ""."""
        if self.quick:
            return ""
        if not (self.on_gpu or one.on_cpu):
            return "a CPU would take minutes"
        free = self.free_gib()
        return f"it takes {one.gib:.1f} GiB, and {free:.1f} are free" if one.gib * 1.1 > free else ""

    def wait(self) -> None:
        """Wait until the device has finished all its work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds until `work` is done on the device."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def milliseconds(self, work: Callable[[], object], warm: int = 3) -> float:
        """Return the milliseconds per call, after `warm` calls: the median of groups that keep the device busy."""
        for _ in range(1 if self.quick else warm):
            work()
        once = self.seconds(work)
        calls = max(1, min(10, int(_GROUP / once))) if self.on_gpu else 1
        groups = 1 if self.quick else 9 if self.on_gpu and once < _SHORT else 3
        times = [self.seconds(lambda: [work() for _ in range(calls)]) / calls for _ in range(groups)]
        return statistics.median(times) * 1000

    def reset_peak(self) -> None:
        """Restart the measurement of peak memory."""
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float:
        """Return the peak memory of tensors since `reset_peak` in GiB; on a CPU the process's peak memory so far."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    def copy_gigabytes(self) -> float:
        """Return GB per second, read and written, of a copy within the device's memory."""
        source = torch.ones(1 << 28 if self.on_gpu else 1 << 22, device=self.device)
        target = torch.empty_like(source)
        return 8 * len(source) / self.milliseconds(lambda: target.copy_(source)) / 1e6


class SkippedError(Exception):
    """A measurement is impossible here, which is not a failure; the message is the reason."""


def require(holds: bool, what: str) -> None:
    """Raise ValueError that names `what`, unless `holds`."""
    if not holds:
        raise ValueError(what)
