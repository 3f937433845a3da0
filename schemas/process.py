"""This process: its cores, its forks, its memory, and the end of its parent."""

import contextlib
import functools
import math
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from schemas.waits import waiting

RESERVED = "EXTREMIS_RESERVED_MEMORY"  # environment variable: bytes that a process beside this one plans to use
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
# Of a cgroup's memory, by its controllers: root, files of the limit and of what is used, and cached pages of that.
_MEMORY_OF = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
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
    # Not `ru_maxrss` where there is another way: a process inherits it from its parent.
    peak = _numbers(_PROC / "self/status").get("VmHWM")
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak is None else peak)


def memory_share() -> int:
    """Return the bytes that this process may use, whatever is in use, less what RESERVED reserves; or sys.maxsize."""
    limit = min((limit for limit, _ in _memory_limits()), default=sys.maxsize)
    return max(0, limit - int(os.environ.get(RESERVED, "0")))


def free_memory() -> int:
    """Return the bytes of memory that this process may still use; sys.maxsize if unknown."""
    return max(0, min((limit - used for limit, used in _memory_limits()), default=sys.maxsize))


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes of the machine, of each cgroup of this process, and of its addresses."""
    machine, own = _numbers(_PROC / "meminfo"), _numbers(_PROC / "self/status")
    if machine:
        yield 1024 * machine["MemTotal"], 1024 * (machine["MemTotal"] - machine["MemAvailable"])
    with contextlib.suppress(OSError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):  # of version 2, and 1
                root, *files, cached = _MEMORY_OF[controllers]
                # In a container, the path may be that of the host, and the root its own folder.
                for folder in (lowest := _CGROUP / root / path.strip("/"), *lowest.parents):
                    with contextlib.suppress(OSError, ValueError):  # no such folder, or the limit is "max"
                        limit, used = (int((folder / name).read_text()) for name in files)
                        yield limit, used - _numbers(folder / "memory.stat").get(cached, 0)
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if own and addresses != resource.RLIM_INFINITY:
        yield addresses - 1024 * (own["VmSize"] - own["VmRSS"]), 1024 * own["VmRSS"]


def _numbers(file: Path) -> dict[str, int]:
    """Return the first number of each line of a file of the system, by name; empty if there is no such file."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def end_with_parent(parent: int | None = None) -> None:
    """End this process when its parent ends, because a worker that outlives a run could write during the next run.

    `parent`: pid of the parent, if known; the parent may have ended already.
    """

    def watch_parent(parent: int) -> None:
        for _ in waiting("", every=0.5):
            if os.getppid() != parent:
                os._exit(1)

    threading.Thread(target=watch_parent, args=(parent or os.getppid(),), daemon=True).start()
