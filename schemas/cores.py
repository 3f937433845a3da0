"""Cores that this process may use: by its affinity and the container's quota."""

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
    """Count the cores that this process may use, one at least."""
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(present, *map(_quota, _QUOTAS))))


def share_cores(threads: int | None = None) -> None:
    """Limit OpenMP, which torch and Faiss use, to these cores, and do not let it spin while it waits.

    To be called before either is loaded. A thread that spins takes a core that other threads have work for. What the
    environment says already stays, unless `threads` are stated, which processes that are started from now on use, too.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", str(cores()))
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _quota(files: tuple[str, ...]) -> float:
    """Return the cores of a quota in a cgroup's `files`; inf without one."""
    try:
        words = " ".join(Path(file).read_text() for file in files).split()
        share, period = map(int, words)
    except (OSError, ValueError):  # there is no such file, or its first word is "max"
        return math.inf
    return share / period if share > 0 and period > 0 else math.inf
