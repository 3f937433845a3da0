"""Seconds and bytes of work on a device, which runs behind the program that gives it work."""

import resource
import statistics
import time
from collections.abc import Callable

import torch


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(work: Callable[[], object], device: torch.device, rounds: int, warm: int = 2) -> float:
    """Return the median of `rounds` groups of three calls, after `warm` of them, by the call."""
    for _ in range(warm):
        work()
    wait_for(device)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(3):
            work()
        wait_for(device)
        times.append((time.perf_counter() - began) / 3)
    return statistics.median(times) * 1000


def reset_peak(device: torch.device) -> None:
    """Begin to count the greatest memory anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Return the greatest memory of tensors since `reset_peak`; on a CPU that of the process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def fits(device: torch.device, needed: float) -> bool:
    """Tell whether `needed` GiB are free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2**30 > needed * 1.1
    return needed < 1.0


def copy_gigabytes(device: torch.device) -> float:
    """Return GB a second, read and written, of a copy within the device's memory."""
    numbers = (1 << 28) if device.type == "cuda" else (1 << 22)
    source = torch.ones(numbers, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 8 * numbers / milliseconds(lambda: target.copy_(source), device, 5) / 1e6
