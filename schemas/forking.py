"""Makes it safe to fork (as a DataLoader does) a process that has open connections or threads of libraries."""

import asyncio
import functools
import os
import selectors
from collections.abc import Callable

import fsspec.asyn


@functools.cache
def survive_forks() -> None:
    """Prevent forked children from using the connections of this process; later calls do nothing.

    A child inherits fsspec's event loop, and with it the epoll instance that the parent waits on. When the child closes
    an inherited connection, the connection is removed from that instance, and the parent waits forever for an answer
    that has already arrived.
    """
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
