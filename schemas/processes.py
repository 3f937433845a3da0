"""Python processes: start a process, end it with its parent, and measure its memory."""

import os
import resource
import sys
import threading

from schemas.waits import waiting

_POLL_SECONDS = 0.5  # interval at which a process checks whether its parent still runs


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


def end_with_parent(parent: int | None = None) -> None:
    """End this process when its parent ends, because a worker that outlives a run could write during the next run.

    `parent`: pid of the parent, if known; the parent may have ended already.
    """

    def watch_parent(parent: int) -> None:
        for _ in waiting("", every=_POLL_SECONDS):
            if os.getppid() != parent:
                os._exit(1)

    threading.Thread(target=watch_parent, args=(parent or os.getppid(),), daemon=True).start()
