"""Training: streams and joins of tables, encoders, classifier, losses, loop, refresh, checkpoints, evaluation.

Legend of shapes: B batch, T tokens, D dimension, P positives, H hard, R random, C candidates, K table width, L labels,
N queries, G ranks, S canonical streams.
"""

import contextlib
import os
import stat
import tempfile


def choose_compile_cache() -> None:
    """Set NUMBA_CACHE_DIR to a folder of this user in TMPDIR if numba would find no folder and refuse to compile."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    in_installation = os.path.join(os.path.dirname(__file__), "rows", "__pycache__")
    if os.environ.get("NUMBA_CACHE_DIR") or _is_writable(in_installation) or _is_writable(os.path.join(cache, "numba")):
        return
    with contextlib.suppress(OSError):  # not every process compiles
        folder = os.path.join(tempfile.gettempdir(), f"extremis-numba-{os.getuid()}")
        os.makedirs(folder, 0o700, exist_ok=True)
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():  # its code would be run
            folder = tempfile.mkdtemp(prefix="extremis-numba-")
        os.environ["NUMBA_CACHE_DIR"] = folder


def _is_writable(folder: str) -> bool:
    """Return whether this user can write to `folder`, or make it; False if it is relative, as ~ may be."""
    while not os.path.exists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return os.access(folder, os.W_OK | os.X_OK)


choose_compile_cache()  # before the first import of numba
