"""Forking with open connections, as a DataLoader does for its workers, and with threads of libraries."""

import asyncio
import functools
import os
import selectors
from collections.abc import Callable

import fsspec.asyn


@functools.cache
def survive_forks() -> None:
    """Make forked children leave the connections of this process alone; registered once.

    A child inherits fsspec's event loop, and with it the epoll instance that the parent waits on. When the child
    closes the connections that it inherited, they are removed from that instance: the parent would wait for ever for
    an answer that has come.
    """
    if not hasattr(os, "register_at_fork"):
        return
    loops: list[asyncio.AbstractEventLoop | None] = [None]

    def remember() -> None:
        loops[0] = fsspec.asyn.loop[0]  # fsspec's own hook forgets it in the child, before ours runs

    def part() -> None:
        loop, loops[0] = loops[0], None
        inherited = getattr(loop, "_selector", None)
        if inherited is not None:
            inherited.close()  # the child's handle: the parent's stays as it is
            loop._selector = selectors.DefaultSelector()  # type: ignore[union-attr]

    os.register_at_fork(before=remember, after_in_child=part)


def one_thread_in_children(set_threads: Callable[[int], object]) -> Callable[[int], object]:
    """Return `set_threads` of a library that uses OpenMP; forked children always set 1.

    A forked child calls it at once: OpenMP's threads do not survive a fork, and a child with more threads would wait
    forever.
    """
    forked = False

    def forget() -> None:
        nonlocal forked
        forked = True
        set_threads(1)

    os.register_at_fork(after_in_child=forget)
    return lambda threads: set_threads(1 if forked else threads)
