"""The image's health check: status 0 when the container's program is alive.

A pool of workers (--worker_pool) and `extremis serve` answer where they listen. Each command of `extremis` gives a
sign of life every two seconds, in a file of the folder EXTREMIS_ALIVE: a process whose file is older than a lease is
stopped.
`health.py PID` asks for the port of another process than the container's first.
"""

import itertools
import os
import socket
import sys
import time
from pathlib import Path

_SECONDS = 10.0
LEASE_SECONDS = 30.0


def port_of(words: list[str]) -> int | None:
    """Return the port that a command line listens on; None: on none."""
    options = dict(zip(words, [*words[1:], ""], strict=True))
    options.update(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    if "--worker_pool" in options:
        return int(options.get("--service_port", 50000))
    if any(word == "serve" and program.endswith("extremis") for program, word in itertools.pairwise(words)):
        return int(options.get("--port", 8000))
    return None


def silent_processes() -> dict[int, float]:
    """Return the running processes without a recent sign of life, with its age in seconds."""
    silent = {}
    for file in Path(os.environ.get("EXTREMIS_ALIVE", "/nowhere")).glob("extremis-*.alive"):
        pid = int(file.stem.removeprefix("extremis-"))
        try:
            born = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
            age = time.time() - file.stat().st_mtime
            if file.read_text() == born and age > LEASE_SECONDS:  # else of an earlier process with this number
                silent[pid] = age
        except FileNotFoundError:  # the process has ended
            continue
    return silent


def main() -> None:
    """Look for signs of life, and connect to the port of the named process; a line says why where that fails."""
    for silent, age in silent_processes().items():
        sys.exit(f"process {silent} has given no sign of life for {age:.0f} s")
    pid = sys.argv[1] if len(sys.argv) > 1 else "1"
    with open(f"/proc/{pid}/cmdline") as cmdline:
        port = port_of(cmdline.read().split("\0"))
    if port is not None:
        try:
            socket.create_connection(("localhost", port), _SECONDS).close()
        except OSError as error:
            sys.exit(f"nobody answers at port {port}: {error}")


if __name__ == "__main__":
    main()
