"""Waits that are told, so that nobody wonders whether a command still works. Help needs them: they load little."""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator

from schemas.errors import redact

SILENT_SECONDS, SAY_SECONDS = 5.0, 60.0  # time before a wait is reported, and between reports
Say = Callable[[str], None]
_listeners: list[Say] = []  # receive reports of waits without a `say`
add_listener = _listeners.append


class Wait:
    """A wait for `what`, as a context manager: `say` gets a report after SILENT_SECONDS, then every SAY_SECONDS.

    `seconds`: maximum duration; `until` then names the setting that limits the wait to `seconds`. Without `seconds`,
    `until` names the event that ends the wait. If `say` is None, the listeners added with `add_listener` get the
    reports. A wait with an empty `what` only watches for something, and is not reported. Of the waits of a `group`, one
    is reported at a time. `cause`: why the wait goes on, if known.
    """

    is_told = True  # as what this process waits for

    def __init__(
        self, what: str, say: Say | None = None, seconds: float | None = None, until: str = "", group: str = ""
    ) -> None:
        self._what, self._say, self._seconds, self._until, self._group = what, say, seconds, until, group
        self.cause = ""
        self._since, self.due = time.time(), time.monotonic() + SILENT_SECONDS

    def change(self, what: str) -> None:
        """Wait for `what` from now on; if `what` differs, the time of the wait starts again."""
        if what != self._what:
            self._what, self._since, self.due = what, time.time(), time.monotonic() + SILENT_SECONDS

    def __enter__(self) -> "Wait":
        if self._what:
            _active_waits.add(self)
            with contextlib.suppress(RuntimeError):  # no thread can start: nothing is reported
                _start_reporter(os.getpid())
        return self

    def __exit__(self, *_: object) -> None:
        _active_waits.discard(self)

    def report(self) -> None:
        """Report that this wait continues, if a report is due."""
        now = time.monotonic()
        if now < self.due or (self._group and now < _due_of_groups.get(self._group, now)):
            return
        self.due = _due_of_groups[self._group] = now + SAY_SECONDS
        until = self._until or "the process is stopped"
        if self._seconds is not None:
            until = f"{_time_of_day(self._since + self._seconds)} at the latest {self._until}".rstrip()
        for say in [self._say] if self._say else _listeners:
            why = f" ({self.cause})" if self.cause else ""
            say(redact(f"waiting for {self._what}{why} since {_time_of_day(self._since)}, until {until}"))


def waiting(
    what: str,
    say: Say | None = None,
    seconds: float | None = None,
    every: float = 0.1,
    until: str = "",
    stop: threading.Event | None = None,
) -> Iterator[Wait]:
    """Yield the wait at once, and again every `every` seconds, until `seconds` have passed or `stop` is set."""
    wait, over, began = Wait(what, say, seconds, until), stop or threading.Event(), time.monotonic()
    while not over.is_set() and (seconds is None or time.monotonic() < began + seconds):
        yield wait
        with wait:
            over.wait(every)


def oldest_wait() -> dict[str, str | float]:
    """Return `waits_for` and `waits_since` (seconds since 1970) of this process's longest wait, if it waits."""
    waits = sorted((wait._since, wait._what) for wait in tuple(_active_waits) if wait.is_told)
    return {"waits_for": redact(waits[0][1]), "waits_since": waits[0][0]} if waits else {}


_active_waits: set[Wait] = set()
_due_of_groups: dict[str, float] = {}  # when a wait of the group may be reported next
os.register_at_fork(after_in_child=_active_waits.clear)


@functools.cache
def _start_reporter(process: int) -> None:
    """Start the thread that reports waits: once per process, and again in a forked process."""

    def work() -> None:
        while True:
            time.sleep(0.25)
            for wait in tuple(_active_waits):
                with contextlib.suppress(Exception):  # an error of a listener must not end the wait
                    wait.report()

    threading.Thread(target=work, name="waits", daemon=True).start()


def _time_of_day(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))
