"""Signs of life while a command prints nothing: a spinner on a terminal, an occasional line elsewhere."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

_TICK = 0.1
_SPINNER_AFTER = 0.3  # seconds of silence
_LINES_AFTER, _LONGEST = 5.0, 30.0  # seconds of silence before the first line, doubled after each line up to _LONGEST
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PLAIN_FRAMES = "|/-\\"


class _Waiting:
    """State of this process's sign of life. Any thread may call the methods."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Switch off the sign of life, for example in a forked process."""
        self._lock = threading.RLock()
        self._text, self._began = "", 0.0
        self._spoken = self._pause = 0.0
        self._suspended, self._shown = 0, False

    def begin(self, text: str) -> None:
        """Set the name of the current work."""
        with self._lock:
            self._text, self._began = text, time.monotonic()
            self.spoke()

    def spoke(self) -> None:
        """Clear the spinner to make room for a line, and restart the wait."""
        with self._lock:
            if self._shown:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
                self._shown = False
            self._spoken, self._pause = time.monotonic(), _LINES_AFTER

    def suspend(self, by: int) -> None:
        """Count other progress displays, such as bars: `by` is +1 for a new display, and -1 for a closed display."""
        with self._lock:
            self.spoke()
            self._suspended += by

    def tick(self, on_terminal: bool, tell: Callable[[str], None], left: Callable[[], str] = str) -> None:
        """Show the sign of life if it is due."""
        with self._lock:
            silent = time.monotonic() - self._spoken
            if self._suspended or not self._text:
                return
            line = f"{self._text}, {time.monotonic() - self._began:.0f} s, {left()}".removesuffix(", ")
            if on_terminal and silent > _SPINNER_AFTER:
                frames = _FRAMES if "utf" in (sys.stderr.encoding or "").lower() else _PLAIN_FRAMES
                frame = frames[int(silent / _TICK) % len(frames)]
                sys.stderr.write(f"\r{frame} {line}\x1b[K")
                sys.stderr.flush()
                self._shown = True
            elif not on_terminal and silent > self._pause:
                pause = min(_LONGEST, 2 * self._pause)
                tell(line)
                self._pause = pause


_waiting = _Waiting()
os.register_at_fork(after_in_child=_waiting.reset)
spoke, doing = _waiting.spoke, _waiting.begin


@contextlib.contextmanager
def alive(title: str, on_terminal: bool, tell: Callable[[str], None], left: Callable[[], str] = str) -> Iterator[None]:
    """Until the block ends, show that `title` is running whenever nothing has been printed for a while.

    `tell` prints a line; `left` describes the remaining time, if it is known.
    """
    over = threading.Event()

    def work() -> None:
        while not over.wait(_TICK):
            _waiting.tick(on_terminal, tell, left)

    _waiting.begin(title)
    thread = threading.Thread(target=work, name="extremis-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _waiting.begin("")


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Show nothing until the block ends, because a bar shows progress."""
    _waiting.suspend(1)
    try:
        yield
    finally:
        _waiting.suspend(-1)
