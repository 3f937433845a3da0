"""Threads: torch's, if their number must not show in the result, and threads that run compiled loops over rows.

A serving process has no torch: a request for threads of torch loads it, and loops take as many threads as Faiss.
"""

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from schemas.forking import one_thread_in_children

PARTS = 8  # of one loop: a fixed number, so that sums of parts do not depend on the number of threads
_ALONE = 2048  # rows for which a second thread costs more than it does
Result = TypeVar("Result")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread of torch within the block: sums over several round as their number decides."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_parts(work: Callable[[int, int, int], Result], rows: int, alone: int = _ALONE) -> list[Result]:
    """Return `work(part, start, stop)` of PARTS equal ranges of [0, rows), on as many threads as torch or Faiss uses.

    Fewer than `alone` rows take one thread. `work` gives up the interpreter's lock, as compiled loops do.
    """
    calls = [(part, rows * part // PARTS, rows * (part + 1) // PARTS) for part in range(PARTS)]
    if rows < alone or (threads := _count()) == 1:
        return list(itertools.starmap(work, calls))
    return list(_threads(threads).map(work, *zip(*calls, strict=True)))


def _count() -> int:
    if torch := sys.modules.get("torch"):
        return int(torch.get_num_threads())
    from search.block import threads

    return threads()


@functools.lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    # Denormals as in the loop that trains, whichever thread a row meets: the setting is a thread's own.
    torch = sys.modules.get("torch")
    return ThreadPoolExecutor(count, "rows", *((torch.set_flush_denormal, (True,)) if torch else ()))


def _set_threads(count: int) -> None:
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not cross a fork
set_threads = one_thread_in_children(_set_threads)
