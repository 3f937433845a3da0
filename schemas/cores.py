"""Number of cores that this process may use, from its CPU affinity and the container's quota."""

import functools
import math
import os
from pathlib import Path

_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


@functools.cache
def cores() -> int:
    """Count the cores that this process may use; the count is at least 1."""
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(present, *map(_quota, _QUOTAS))))


def limit_openmp_threads(threads: int | None = None) -> None:
    """Limit OpenMP, which torch and Faiss use, to `cores()` threads, and stop waiting threads from spinning.

    Call this function before torch and Faiss are loaded. A spinning thread occupies a core that other threads need.
    Environment variables that are already set are kept. If `threads` is given, it overrides the number of threads, also
    for processes that start later.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", str(cores()))
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _quota(files: tuple[str, ...]) -> float:
    """Return the number of cores that a cgroup's `files` allow, or inf without a quota."""
    try:
        words = " ".join(Path(file).read_text() for file in files).split()
        share, period = map(int, words)
    except (OSError, ValueError):  # the file does not exist, or its first word is "max"
        return math.inf
    return share / period if share > 0 and period > 0 else math.inf
