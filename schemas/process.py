"""This process: its cores, its forks, its memory, and the end of its parent."""

import contextlib
import functools
import math
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from schemas.waits import waiting

_CGROUP = Path("/sys/fs/cgroup")
# Files of a cgroup's quota: microseconds of all cores, in microseconds of time.
_QUOTAS = ("/sys/fs/cgroup/cpu.max",), ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us")


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
    try:
        words = " ".join(Path(file).read_text() for file in files).split()
        share, period = map(int, words)
    except (OSError, ValueError):  # the file does not exist, or its first word is "max"
        return math.inf
    return share / period if share > 0 and period > 0 else math.inf


@functools.cache
def survive_forks() -> None:
    """Prevent forked children from using the connections of this process; later calls do nothing.

    A child inherits fsspec's event loop, and with it the epoll instance that the parent waits on. When the child closes
    an inherited connection, the connection is removed from that instance, and the parent waits forever for an answer
    that has already arrived.
    """
    import asyncio  # help needs none of these
    import selectors

    import fsspec.asyn

    if not hasattr(os, "register_at_fork"):
        return
    loops: list[asyncio.AbstractEventLoop | None] = [None]

    def save_loop() -> None:
        loops[0] = fsspec.asyn.loop[0]  # fsspec's own hook clears the loop in the child before our hook runs

    def replace_selector() -> None:
        loop, loops[0] = loops[0], None
        inherited = getattr(loop, "_selector", None)
        if inherited is not None:
            inherited.close()  # closes the child's handle; the parent's handle stays open
            loop._selector = selectors.DefaultSelector()  # type: ignore[union-attr]

    os.register_at_fork(before=save_loop, after_in_child=replace_selector)


def one_thread_in_children(set_threads: Callable[[int], object]) -> Callable[[int], object]:
    """Wrap `set_threads` of a library that uses OpenMP, so that forked children always use one thread.

    A forked child calls `set_threads(1)` at once: OpenMP's threads do not survive a fork, and a child with more threads
    would wait forever.
    """
    forked = False

    def use_one_thread() -> None:
        nonlocal forked
        forked = True
        set_threads(1)

    os.register_at_fork(after_in_child=use_one_thread)
    return lambda threads: set_threads(1 if forked else threads)


def python_command(program: str, *arguments: str) -> list[str]:
    """Return the command line that runs `program` in a Python process with this process's module paths.

    By default, Python puts the current folder first, and this folder may contain packages with the same names as ours.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}", *arguments]


def peak_bytes() -> int:
    """Return the peak memory of this process since it started, in bytes."""
    try:
        # Not `ru_maxrss`: a process inherits it from its parent.
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory() -> int | None:
    """Return the bytes of memory that are available to this process in its container; None if unknown."""
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        stat = (_CGROUP / "memory.stat").read_text().splitlines()
        cached = int(next(line for line in stat if line.startswith("inactive_file ")).split()[1])
        limit, used = ((_CGROUP / name).read_text() for name in ("memory.max", "memory.current"))
        limits.append(int(limit) - int(used) + cached)
    return min(limits, default=None)


def end_with_parent(parent: int | None = None) -> None:
    """End this process when its parent ends, because a worker that outlives a run could write during the next run.

    `parent`: pid of the parent, if known; the parent may have ended already.
    """

    def watch_parent(parent: int) -> None:
        for _ in waiting("", every=0.5):
            if os.getppid() != parent:
                os._exit(1)

    threading.Thread(target=watch_parent, args=(parent or os.getppid(),), daemon=True).start()
