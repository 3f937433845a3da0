"""Stops a run on a signal, as on preempted machines; the run first saves a checkpoint if the grace period allows."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from schemas.errors import ExtremisError

GRACE = 25.0  # seconds for saving a checkpoint: preempted machines get 30


class StoppedError(ExtremisError):
    """The run stopped on request. The exit status is always 143, as after SIGTERM."""

    exit_status = 128 + signal.SIGTERM


@contextlib.contextmanager
def stopping_on_signal(grace: float) -> Iterator[threading.Event]:
    """Yield an event that SIGTERM or SIGHUP sets; the process ends at most `grace` seconds after the signal.

    A second signal ends the process at once. With a `grace` of 0 the first signal ends the process at once. Under
    nohup, SIGHUP is still ignored. Only the main thread receives signals.
    """
    stop_requested = threading.Event()
    if threading.current_thread() is not threading.main_thread() or not grace:
        yield stop_requested
        return

    def end() -> None:
        os._exit(StoppedError.exit_status)

    timer = threading.Timer(grace, end)
    timer.daemon = True

    def handle_signal(_: int, frame: FrameType | None) -> None:
        if stop_requested.is_set():
            end()
        stop_requested.set()
        timer.start()

    numbers = [signal.SIGTERM, *([] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP])]
    before = {number: signal.signal(number, handle_signal) for number in numbers}
    try:
        yield stop_requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        timer.cancel()
