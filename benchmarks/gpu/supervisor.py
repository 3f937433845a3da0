"""Supervises the measuring process: ends a process that hangs or exceeds the time, and replaces a process that dies."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.results import Results
from benchmarks.gpu.worker import BAD_INPUT

_SPARED = 8.0  # seconds before the deadline, because a process with a device takes time to end
_STARTING = 120.0  # seconds until the first message


def supervise(worker: Sequence[str], folder: Path, deadline: float) -> list[str]:
    """Run the command `worker` until all is measured or time is over; return the names of all measurements.

    Raises SystemExit for wrong arguments.
    """
    planned: list[str] = []
    while True:
        process = subprocess.Popen(worker, stdout=subprocess.PIPE, text=True, start_new_session=True)
        with _ended(process):
            begun, why = _follow(process, planned, deadline - _SPARED)
        if process.returncode == BAD_INPUT:
            raise SystemExit(BAD_INPUT)
        if not (begun and why):  # all is done, time is over, or no measurement can start
            return planned
        results = Results(folder)
        if begun not in results.rows:
            results.add(begun, {"failed": why})


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """End the process and all its children when the block ends, also after SIGTERM."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _follow(process: subprocess.Popen[str], planned: list[str], end: float) -> tuple[str, str]:
    """Return the last started measurement or "", and the reason for ending the process ("": its own end, or `end`)."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    begun, limit = "", _STARTING
    while True:
        now = time.monotonic()
        try:
            line = lines.get(timeout=max(0.0, min(limit, end - now)))
        except queue.Empty:
            return begun, f"it took more than {limit:.0f} seconds" if now + limit < end else ""
        if not line:
            status = process.wait()
            return begun, f"its process ended with status {status}" if status else ""
        word = json.loads(line)
        planned[:] = word.get("plan", planned)
        begun, limit = word.get("begun", begun), word.get("seconds", _STARTING)
        if "begun" in word:
            sys.stderr.write(f"{begun}\n")
