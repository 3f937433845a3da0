"""Claims that are held by somebody else."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.owners.claim import claimed


@contextmanager
def held_elsewhere(root: str, doing: str = "mined") -> Iterator[None]:
    """Let another thread hold the claim on `root` for the block: to this one it is as another process."""
    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with claimed(root, doing):
            held.set()
            ended.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(60)
        yield
    finally:
        ended.set()
        thread.join()
