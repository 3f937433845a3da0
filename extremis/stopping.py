"""Requests by signal to end a run, as on preempted machines: it saves a checkpoint if the grace period allows."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from schemas.errors import option
from schemas.logs import json_line, logs_json

GRACE = 25.0  # seconds for saving a checkpoint: preempted machines get 30


@contextlib.contextmanager
def stopping_on_signal(grace: float) -> Iterator[threading.Event]:
    """Yield an event that SIGTERM, SIGHUP or Ctrl-C sets; after SIGTERM or SIGHUP, end within `grace` seconds.

    A second signal ends the process at once; a second Ctrl-C raises KeyboardInterrupt. With a `grace` of 0 the first
    signal does. SIGHUP and Ctrl-C stay ignored if they are, as under nohup. Only the main thread receives signals.
    """
    stop_requested = threading.Event()
    if threading.current_thread() is not threading.main_thread() or not grace:
        yield stop_requested
        return

    def end(cause: str) -> None:
        _print(f"error: no checkpoint was saved {cause}; {option('resume', True)} continues from an earlier one")
        os._exit(128 + signal.SIGTERM)  # as a StoppedError

    timer = threading.Timer(grace, end, [f"within {option('grace', grace)} s"])
    timer.daemon = True

    def handle_signal(number: int, frame: FrameType | None) -> None:
        interactive = number == signal.SIGINT
        if stop_requested.is_set():
            if interactive:
                signal.default_int_handler(number, frame)
            end("before a second signal")
        stop_requested.set()
        if interactive:
            _print("saving a checkpoint after this step; a second Ctrl-C ends the run without it")
        else:
            timer.start()

    optional = [number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle_signal) for number in (signal.SIGTERM, *optional)}
    try:
        yield stop_requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        timer.cancel()


def _print(line: str) -> None:
    """Print a line from a signal handler, which must not wait for the lock of another output."""
    text = os.isatty(2) * "\n" + f"{line}\n"  # below a progress bar
    with contextlib.suppress(OSError):
        os.write(2, (json_line("warning", "stop", line) if logs_json() else text).encode())
