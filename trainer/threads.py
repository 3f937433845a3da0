"""Threads: a single torch thread where the number of threads would change results, and threads for loops over rows.

A serving process does not import torch. Without torch, compiled loops use as many threads as Faiss.
"""

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from schemas.process import one_thread_in_children
from search.topk import faiss_threads

RANGES = 8  # parts of one loop: a fixed number, so that sums of parts do not depend on the number of threads
_MIN_ROWS = 2048  # rows below which a second thread does not pay off
Result = TypeVar("Result")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread within the block, since the rounding of sums depends on the number of threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def map_ranges(work: Callable[[int, int, int], Result], rows: int, min_rows: int = _MIN_ROWS) -> list[Result]:
    """Return `work(part, start, stop)` for RANGES equal ranges of [0, rows), on as many threads as torch or Faiss uses.

    For fewer than `min_rows` rows, one thread does all the work. `work` must release the interpreter's lock, as
    compiled loops do.
    """
    calls = [(part, rows * part // RANGES, rows * (part + 1) // RANGES) for part in range(RANGES)]
    if rows < min_rows or (threads := _count()) == 1:
        return list(itertools.starmap(work, calls))
    return list(_threads(threads).map(work, *zip(*calls, strict=True)))


def _count() -> int:
    if torch := sys.modules.get("torch"):
        return int(torch.get_num_threads())
    return faiss_threads()


@functools.lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    # Flush denormals as the training loop does, in every thread: each thread has its own setting.
    torch = sys.modules.get("torch")
    return ThreadPoolExecutor(count, "rows", *((torch.set_flush_denormal, (True,)) if torch else ()))


def _set_threads(count: int) -> None:
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork
set_threads = one_thread_in_children(_set_threads)
