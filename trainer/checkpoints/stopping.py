"""Stopping by a signal: a run saves a checkpoint first if its grace period allows, for preempted machines."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from schemas.errors import ExtremisError

GRACE = 25.0  # seconds for saving a checkpoint: preempted machines get 30


class StoppedError(ExtremisError):
    """Error: the run stopped on request. The exit status is that of a process ended by SIGTERM, for any cause."""

    exit_status = 128 + signal.SIGTERM


@contextlib.contextmanager
def stopping_on_signal(grace: float) -> Iterator[threading.Event]:
    """Yield an event that SIGTERM or SIGHUP sets while the block lasts; the process ends `grace` seconds later at the
    latest.

    A second signal ends the process at once, and so does the first with a `grace` of 0. SIGHUP stays ignored under
    nohup. Only the main thread receives signals.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread() or not grace:
        yield asked
        return

    def end() -> None:
        os._exit(StoppedError.exit_status)

    timer = threading.Timer(grace, end)
    timer.daemon = True

    def hear(_: int, frame: FrameType | None) -> None:
        if asked.is_set():
            end()
        asked.set()
        timer.start()

    numbers = [signal.SIGTERM, *([] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP])]
    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        timer.cancel()
