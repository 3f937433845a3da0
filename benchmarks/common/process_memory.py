"""Run a command as a separate process, and measure the memory of the process and its children."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True)
class CommandUsage:
    """Seconds of a command, and the peak bytes of all its processes together (shared pages count once).

    `samples`: (`time.monotonic()`, bytes, bytes without pages of files) over time. `launcher_bytes`: the peak of the
    command's own process.
    """

    status: int
    seconds: float
    peak_bytes: int
    most_processes: int
    output: str
    samples: tuple[tuple[float, int, int], ...]
    launcher_bytes: int = 0


def measure(
    command: Sequence[str],
    interval: float = 0.5,
    started: "Callable[[subprocess.Popen[str]], None] | None" = None,
    **popen: object,
) -> CommandUsage:
    """Run `command` to its end, and sample its process tree every `interval` seconds; `started` gets the process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **popen)  # type: ignore[call-overload]
    samples: list[tuple[float, int, int]] = []
    most = launcher = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most, launcher
        while not done.wait(interval):
            held, anonymous, own, count = _held(process.pid)
            samples.append((time.monotonic(), held, anonymous))
            most, launcher = max(most, count), max(launcher, own)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    if started is not None:
        started(process)
    output, _ = process.communicate()
    done.set()
    watcher.join()
    peak = max((held for _, held, _ in samples), default=0)
    return CommandUsage(process.returncode, time.perf_counter() - start, peak, most, output, tuple(samples), launcher)


def sample_peaks(process: "subprocess.Popen[Any]", interval: float = 0.02) -> dict[int, int]:
    """Wait for a process; return the peak bytes without pages of files of it and of each of its children, by pid."""
    root, peaks = psutil.Process(process.pid), dict[int, int]()
    while process.poll() is None:
        with contextlib.suppress(psutil.Error, OSError, StopIteration):  # the process has ended in the meantime
            for each in [root, *root.children(recursive=True)]:
                with open(f"/proc/{each.pid}/status") as file:
                    held = 1024 * next(int(line.split()[1]) for line in file if line.startswith("RssAnon:"))
                peaks[each.pid] = max(peaks.get(each.pid, 0), held)
        time.sleep(interval)
    return peaks


def _held(pid: int) -> tuple[int, int, int, int]:
    """Return (proportional set size of the process tree, without pages of files, of the root; number of processes)."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0, 0, 0, 0
    held = anonymous = own = 0
    for process in tree:
        try:
            with open(f"/proc/{process.pid}/smaps_rollup") as file:
                sizes = dict(line.split()[:2] for line in file if line.startswith("Pss"))
        except OSError:  # the process has ended in the meantime
            continue
        held += int(sizes["Pss:"]) * 1024
        anonymous += int(sizes["Pss_Anon:"]) * 1024
        own = int(sizes["Pss:"]) * 1024 if process is root else own
    return held, anonymous, own, len(tree)
