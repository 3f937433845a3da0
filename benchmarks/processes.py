"""A command as a process of its own, and the memory of it and all its children while it runs."""

import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Measured:
    """How a command went: seconds, and the most bytes that all its processes held together (shared pages once)."""

    status: int
    seconds: float
    peak_bytes: int
    most_processes: int
    output: str


def measure(command: Sequence[str], interval: float = 0.5, **popen: object) -> Measured:
    """Run `command` to its end and sample its process tree every `interval` seconds."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **popen)  # type: ignore[call-overload]
    peaks = [0, 0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(interval):
            held, count = _held(process.pid)
            peaks[0], peaks[1] = max(peaks[0], held), max(peaks[1], count)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    output, _ = process.communicate()
    done.set()
    watcher.join()
    return Measured(process.returncode, time.perf_counter() - start, peaks[0], peaks[1], output)


def _held(pid: int) -> tuple[int, int]:
    """(bytes of the process tree by proportional set size, number of processes)."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0, 0
    held = 0
    for process in tree:
        try:
            memory = process.memory_full_info()
            held += getattr(memory, "pss", memory.rss)
        except psutil.Error:
            continue
    return held, len(tree)
