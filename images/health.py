"""The image's health check: status 0 when the container's program answers where it listens.

A pool of workers listens (--worker_pool), a trainer with --metrics-port, and `extremis serve`; other programs are well
while they run.
`health.py PID` asks for another process than the container's first.
"""

import itertools
import socket
import sys

_SECONDS = 10.0


def port_of(words: list[str]) -> int | None:
    """Return the port that a command line listens on; None: on none."""
    options = dict(zip(words, [*words[1:], ""], strict=True))
    options.update(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    if "--worker_pool" in options:
        return int(options.get("--service_port", 50000))
    if any(word == "serve" and program.endswith("extremis") for program, word in itertools.pairwise(words)):
        return int(options.get("--port", 8000))
    return int(options.get("--metrics-port", 0)) or None


def main() -> None:
    """Connect to the port of the process that is named; a line says why where that fails."""
    pid = sys.argv[1] if len(sys.argv) > 1 else "1"
    with open(f"/proc/{pid}/cmdline") as file:
        port = port_of(file.read().split("\0"))
    if port is not None:
        try:
            socket.create_connection(("localhost", port), _SECONDS).close()
        except OSError as error:
            sys.exit(f"nobody answers at port {port}: {error}")


if __name__ == "__main__":
    main()
