"""Python processes: one that is started beside this one, and the memory that this one has held."""

import resource
import sys


def python_command(program: str, *arguments: str) -> list[str]:
    """Return the command of a Python process that runs `program`, with modules from where this one has them.

    Python would put the current folder first, where there may be other packages of our names.
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
