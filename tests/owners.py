"""Claims that are held by somebody else."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import ClaimedError
from schemas.owners import claimed


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


def ask_at_once(root: str, askers: int, seconds: float) -> Counter[str]:
    """Let threads ask for the claim on `root` at once, and hold it for a while: how many had it alone, or were refused.

    None has it while another one does; on a busy machine one may have it after another.
    """
    ready, inside, ends = threading.Barrier(askers), threading.Semaphore(), Counter[str]()

    def ask() -> None:
        ready.wait()
        try:
            with claimed(root, "mined") as held:
                ends["alone" if inside.acquire(blocking=False) else "not alone"] += 1
                time.sleep(seconds)
                held.require()
                inside.release()
        except ClaimedError:
            ends["refused"] += 1

    threads = [threading.Thread(target=ask) for _ in range(askers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends
