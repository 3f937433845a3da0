"""Python processes that are started beside this one."""

import sys


def python_command(program: str, *arguments: str) -> list[str]:
    """Return the command of a Python process that runs `program`, with modules from where this one has them.

    Python would put the current folder first, where there may be other packages of our names.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}", *arguments]
