"""Processes of a session, and their end."""

import time
from pathlib import Path


def alive(session: int) -> list[int]:
    """Processes of a session (one started with `start_new_session`) that still run, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_until_gone(session: int, seconds: float = 20.0) -> None:
    """Until no process of the session runs."""
    limit = time.monotonic() + seconds
    while alive(session):
        assert time.monotonic() < limit, "a process outlived the one that started it"
        time.sleep(0.01)
