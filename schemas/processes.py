"""Python processes: how to start one, how it ends with its parent, and how much memory it used."""

import os
import resource
import sys
import threading

from schemas.waits import waiting

_LOOK_SECONDS = 0.5  # of a process, whether its parent is there


def python_command(program: str, *arguments: str) -> list[str]:
    """Return the command of a Python process that runs `program` with the module paths of this process.

    Python would put the current folder first, which may contain packages with our names.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}", *arguments]


def peak_bytes() -> int:
    """Return the most memory that this process has held since it started."""
    try:
        # Not `ru_maxrss`: a process inherits it from the one that started it.
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def end_with_parent(parent: int | None = None) -> None:
    """End this process with its parent: a worker that outlived a run would write next to the following run.

    `parent`: number of that process, if it is known, which may be gone by now.
    """

    def watch_parent(parent: int) -> None:
        for _ in waiting("", every=_LOOK_SECONDS):
            if os.getppid() != parent:
                os._exit(1)

    threading.Thread(target=watch_parent, args=(parent or os.getppid(),), daemon=True).start()
